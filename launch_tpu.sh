#!/usr/bin/env bash
# Trains on a Cloud TPU VM or a GPU VM, or in several processes on this machine.
#
# usage: ./launch_tpu.sh VERB [OPTIONS] [-- ARGUMENTS]
# example: ./launch_tpu.sh local -- --config configs/lm.py:tiny --workdir runs/two
#
#   create   make the VM; ARGUMENTS are further options of gcloud's create
#   setup    install this checkout on every worker of the VM
#   run      start echo-jax train ARGUMENTS on every worker, in the background
#   logs     show the end of a worker's log
#   status   show the state of the VM and of each worker
#   stop     send SIGTERM to the training, and wait until it has saved and ended
#   delete   delete the VM and its disk
#   local    run echo-jax train ARGUMENTS in several processes on this machine
#
# An option is a flag or an environment variable: --zone is ECHO_JAX_ZONE.
#   --name, --project, --zone  of the VM (default: echo-jax, and gcloud's own)
#   --type TYPE        v5litepod-16, v6e-8, ...; with --gpu g2-standard-8, ...
#   --version VERSION  runtime of the TPU, or image family (default: by type)
#   --gpu              a GPU VM instead of a TPU VM
#   --queued           the TPU VM is a queued resource
#   --spot             create: cheaper, but Google Cloud may take the VM away
#   --bucket gs://B/P  run: copy each worker's log to P/NAME every minute
#   --worker N         logs: the number of a worker, or all (default: 0)
#   --follow           logs: continue as the log grows, until Ctrl-C
#   --yes              delete: do not ask
#   --grace S          stop, local: after S seconds, kill what runs (default: 60)
#   --processes N      local: number of processes (default: 2)
#   --log-dir DIR      local: receives process-0.log, ... (default: runs/logs)
#   --dry-run          print every command and change nothing
#
# All workers share one --workdir: a bucket, or a disk that each of them mounts.
# local runs the program in ECHO_JAX_COMMAND (default: echo-jax). When a process
# fails, or local gets a signal or is killed, all processes get SIGTERM.
set -euo pipefail

die() { # what is wrong, and what to do
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  exit 2
}

((BASH_VERSINFO[0] * 10 + BASH_VERSINFO[1] >= 44)) || die "install bash 4.4, got $BASH_VERSION"
readonly OPTIONS=" name project zone type version bucket worker grace processes log_dir "
readonly SWITCHES=" gpu queued spot follow yes dry_run "
declare -A opt=([name]=echo-jax [worker]=0 [grace]=60 [processes]=2 [log_dir]=runs/logs)

act() { # a command
  if [[ ${opt[dry_run]} ]]; then printf '%q ' "$@" && echo; else "$@"; fi
}

verb=${1:---help}
for key in $OPTIONS $SWITCHES; do
  variable=ECHO_JAX_${key^^}
  opt[$key]=${!variable:-${opt[$key]:-}}
done
while shift && (($#)) && [[ $1 != -- ]]; do
  [[ $1 != --help ]] || { verb=--help && break; }
  key=${1%%=*} key=${key#--} key=${key//-/_}
  [[ $1 == --* && $OPTIONS$SWITCHES == *" $key "* ]] ||
    die "there is no option '$1'; see ./launch_tpu.sh --help"
  if [[ $1 != *=* && $OPTIONS == *" $key "* ]]; then
    (($# > 1)) || die "$1 needs a value"
    set -- "$1=$2" "${@:3}"
  fi
  opt[$key]=1
  [[ $1 != *=* ]] || opt[$key]=${1#*=}
done
arguments=("${@:2}")
for key in $SWITCHES; do [[ ${opt[$key]} != 0 ]] || opt[$key]=; done
# Bash would run code in brackets if it computed with an unchecked value.
for number in "--grace=${opt[grace]}" "--processes=${opt[processes]}" \
  "JAX_NUM_CPU_DEVICES=${JAX_NUM_CPU_DEVICES:=1}" "NPROC=${NPROC:=$(getconf _NPROCESSORS_ONLN)}"; do
  [[ ${number#*=} =~ ^[1-9][0-9]*$ ]] || die "${number%%=*} must be a whole number above 0, got ${number#*=}"
done

where=(${opt[project]:+"--project=${opt[project]}"} ${opt[zone]:+"--zone=${opt[zone]}"})
vm=(gcloud compute tpus tpu-vm) reach=("${vm[@]}") workers=(--worker=all) state=state extra=tpu
if [[ ${opt[gpu]} ]]; then
  vm=(gcloud compute instances) reach=(gcloud compute) workers=() state=status extra=cuda
elif [[ ${opt[queued]} ]]; then
  vm=(gcloud compute tpus queued-resources) state=state.state
fi

declare -rA VERSIONS=([v2]=tpu-ubuntu2204-base [v3]=tpu-ubuntu2204-base [v4]=tpu-ubuntu2204-base
  [v5litepod]=v2-alpha-tpuv5-lite [v5p]=v2-alpha-tpuv5 [v6e]=v2-alpha-tpuv6e
  [gpu]=common-cu128-ubuntu-2204-nvidia-570)

verb_create() {
  local type=${opt[type]:-none} gpu=${opt[gpu]:+gpu} flags=(${opt[spot]:+--spot})
  local version=${opt[version]:-${VERSIONS[${gpu:-${type%%-*}}]:-}}
  [[ ${opt[type]} && $version ]] || die "add --type, such as v5litepod-16, or also --version, got '$type'"
  if [[ ${opt[gpu]} ]]; then
    # Google Cloud stops a pre-empted VM and keeps its disk.
    flags=(${opt[spot]:+--provisioning-model=SPOT --instance-termination-action=STOP}
      --machine-type="$type" --image-family="$version"
      --image-project=deeplearning-platform-release --boot-disk-size=200GB
      --maintenance-policy=TERMINATE --scopes=cloud-platform)
  else
    flags+=(${opt[queued]:+"--node-id=${opt[name]}"} --accelerator-type="$type"
      "--${opt[queued]:+runtime-}version=$version")
  fi
  act "${vm[@]}" create "${opt[name]}" "${where[@]}" "${flags[@]}" "${arguments[@]}"
}

verb_--help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"; }
verb_delete() { act "${vm[@]}" delete "${opt[name]}" "${where[@]}" ${opt[queued]:+--force} ${opt[yes]:+--quiet}; }

# On every worker ~/echo-jax has what training needs. What trains holds its lock.
on_workers() { # a script
  act "${reach[@]}" ssh "${opt[name]}" "${where[@]}" "${workers[@]}" --quiet \
    --command="mkdir -p echo-jax && cd echo-jax && touch train.log && exec 9>>lock && $1"
}

# shellcheck disable=SC2016 # The worker expands them.
readonly IDLE='{ flock -n 9 || { echo "$(hostname) is training: stop it first" >&2; exit 2; }; }' TRAIN='to=$1; shift; cd src
copy() { [ -z "$to" ] || gcloud storage cp ../train.log "$to/$(hostname).log" >/dev/null 2>&1; }
while sleep 60; do copy; done 9>&- & copier=$!
echo "== $(date): echo-jax train $*"
(echo $BASHPID >../pid.part; mv ../pid.part ../pid; exec ../venv/bin/echo-jax train "$@")
echo "== ended with exit code $?"; kill $copier; copy'

verb_setup() {
  local bundle=dist/${opt[name]}.tgz
  cd "$(dirname "${BASH_SOURCE[0]}")"
  act mkdir -p dist
  act tar -czf "$bundle" --exclude=__pycache__ configs echo_jax* pyproject.toml README.md LICENSE
  act "${reach[@]}" scp "$bundle" "${opt[name]}:echo-jax.tgz" "${where[@]}" "${workers[@]}" --quiet
  # The images' Python may be too old; uv brings one.
  on_workers "$IDLE && rm -rf src && mkdir src && tar -xzf ../echo-jax.tgz -C src &&
{ [ -x bin/uv ] || curl -LsSf https://astral.sh/uv/install.sh | env UV_UNMANAGED_INSTALL=\$PWD/bin sh; } &&
{ [ -x venv/bin/python ] || bin/uv venv --python 3.12 venv; } &&
bin/uv pip install --python venv/bin/python --reinstall-package echo-jax './src[$extra,gcs]'"
}

verb_run() {
  local to=${opt[bucket]:+${opt[bucket]%/}/${opt[name]}}
  # In a session of its own, because the end of ssh sends SIGHUP.
  on_workers "$IDLE && { [ -x venv/bin/echo-jax ] || { echo 'run setup first' >&2; exit 2; }; } &&
rm -f pid && { setsid bash -c ${TRAIN@Q} bash ${to@Q} ${arguments[*]@Q} >>train.log 2>&1 </dev/null & } &&
until [ -e pid ]; do sleep 0.1; done"
}

verb_logs() {
  [[ ${opt[gpu]} ]] || workers=("--worker=${opt[worker]}")
  on_workers "tail -n 100 ${opt[follow]:+-F} train.log"
}

verb_status() {
  act "${vm[@]}" describe "${opt[name]}" "${where[@]}" --format="value($state)"
  on_workers "if flock -n 9; then s=idle; else s=training; fi; echo \$(hostname) \$s; tail -n 1 train.log"
}

verb_stop() {
  on_workers "flock -n 9 || { kill \$(cat pid); flock -w ${opt[grace]} 9; } ||
{ echo \$(hostname): killed; kill -9 -\$((\$(ps -o pgid= \$(cat pid)))); }; tail -n 2 train.log"
}

verb_local() {
  local n port log command guard=() pids=() status=0 code deadline=''
  # Virtual CPU devices that wait for each other need two threads each.
  local threads=$((NPROC > 2 * JAX_NUM_CPU_DEVICES ? NPROC : 2 * JAX_NUM_CPU_DEVICES))
  until port=$((20000 + RANDOM % 12768)) && ! (: >"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do :; done
  # With it, Linux stops the processes when this script is killed.
  ! command -v setpriv >/dev/null || guard=(setpriv --pdeathsig TERM)
  trap 'deadline=${deadline:-$((SECONDS + opt[grace]))}; kill "${pids[@]}" 2>/dev/null || true' \
    TERM INT HUP USR1 USR2
  act mkdir -p "${opt[log_dir]}"
  for ((n = 0; n < opt[processes]; n++)); do
    log=${opt[log_dir]}/process-$n.log
    command=("${guard[@]}" env "NPROC=$threads" "${ECHO_JAX_COMMAND:-echo-jax}" train "${arguments[@]}"
      "--config.distributed.coordinator=127.0.0.1:$port" "--config.distributed.process_id=$n"
      "--config.distributed.num_processes=${opt[processes]}")
    [[ -z ${opt[dry_run]} ]] || { printf '%s >>%q 2>&1 &\n' "$(act "${command[@]}")" "$log" && continue; }
    # Shows what the first process appends to its log.
    ((n)) || { touch "$log" && exec 4<"$log" && cat <&4 >/dev/null; }
    "${command[@]}" >>"$log" 2>&1 </dev/null &
    pids[n]=$!
  done
  while ((${#pids[@]})); do
    sleep 0.2 || true
    for n in "${!pids[@]}"; do
      ! kill -0 "${pids[n]}" 2>/dev/null || continue
      code=0 && wait "${pids[n]}" || code=$?
      unset "pids[n]"
      echo "process $n ended with exit code $code: see ${opt[log_dir]}/process-$n.log" >&2
      ((code == 0 || status)) || { status=$code && kill -USR1 $$; } # Stops the others.
    done
    cat <&4 || true
    [[ -z $deadline ]] || ((SECONDS <= deadline)) || kill -9 "${pids[@]}" 2>/dev/null || true
  done
  return "$status"
}

declare -F "verb_$verb" >/dev/null || die "there is no verb '$verb'; see ./launch_tpu.sh --help"
[[ ! $verb =~ ^(run|local)$ ]] || ((${#arguments[@]})) ||
  die "$verb needs the arguments of echo-jax train: -- --config ... --workdir ..."
"verb_$verb"
