#!/usr/bin/env bash
# Trains on a Cloud TPU VM, on a GPU VM, or in several processes on this machine.
# What happens on a worker of a VM, and to processes here, is in launch_worker.sh.
set -euo pipefail

# shellcheck source=launch_worker.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch_worker.sh"

readonly THERE=echo-jax # A folder in the home folder of every worker.
readonly MAX_FAILURES=5 # In a row, before --watch gives up.

# -- Help -------------------------------------------------------------------------

usage() {
  cat <<'END'
usage: ./launch_tpu.sh VERB [SETTINGS] [-- ARGUMENTS OF echo-jax train]

  create   make a TPU VM or a GPU VM
  setup    install this checkout there; what is there already is kept
  run      start training there, in the background
  logs     show what it prints
  status   show the VM's state, and what each worker does
  stop     ask it to save and end, and wait for that
  delete   delete the VM
  local    train in several processes on this machine

Each verb has a --help of its own. A setting is a flag, or else an environment
variable: --zone is ECHO_JAX_ZONE.

  --name NAME        of the VM (default: echo-jax)
  --project, --zone  where (default: gcloud's own)
  --type TYPE        v5litepod-16, v6e-8, …; with --gpu g2-standard-8, …
  --version VERSION  the TPU's runtime version, or the GPU's image family
                     (default: by type)
  --bucket gs://B/P  receives the logs, in P/NAME/WORKER
  --gpu              a GPU VM instead of a TPU VM
  --queued           the TPU VM as a queued resource
  --spot             may be pre-empted, and is cheaper
  --grace S          seconds to save in, once stopped (default: 60)
  --poll S           seconds between two looks of --watch, and between two
                     copies of the logs to the bucket (default: 60)
  --dry-run          print every command, and change nothing

example:
  export ECHO_JAX_ZONE=us-west4-a ECHO_JAX_TYPE=v5litepod-16
  ./launch_tpu.sh create --spot && ./launch_tpu.sh setup
  ./launch_tpu.sh run -- --config configs/lm.py --workdir gs://B/runs/lm

What follows -- reaches echo-jax train as it is, with fields of the config such as
--config.xla.preset=overlap, which says how XLA sums gradients over the devices.
All workers share one --workdir: for several, or to outlive a pre-emption of a TPU
VM, it has to be in a bucket, gs://B/P, or on a disk that is mounted on each.
END
}

usage_of() { # verb
  local about example=$1
  case $1 in
    create)
      about="Makes the VM. With --queued it is asked for, and is there when status says ACTIVE."
      example="create --type v5litepod-16 --zone us-west4-a --spot" ;;
    setup)
      about="Builds a wheel of this checkout and installs it on every worker, with configs/,
in a virtual environment with the extras gcs and tpu or cuda. Workers that have just
this already are left alone. Needs python3 with pip here." ;;
    run)
      about="Starts echo-jax train on every worker, in the background, in a folder with
configs/. All workers share one --workdir, in a bucket, gs://B/P, or on a disk
mounted on each; and a pre-empted TPU VM loses the disk of its own.

  --watch   stay; make a missing or pre-empted VM, set it up, and run the same
            command until it ends. Leave it with Ctrl-C, and come back to it with
            the same command. What ended with 75, because data did not come or a
            process was lost, is tried 5 times in all. Exit code: 0 if training
            finished, 143 if it was stopped by stop, else what it failed with."
      example="run --watch -- --config configs/lm.py --workdir gs://B/runs/lm" ;;
    logs)
      about="Shows the end of a worker's log.

  --worker N   whose, or all (default: 0)
  --follow     go on as it grows, until Ctrl-C"
      example="logs --follow" ;;
    status)
      about="Prints the VM's state, and a line for each worker: new (not set up), idle,
running PID COMMAND, ended CODE, stopped CODE, or lost (the worker restarted)." ;;
    stop)
      about="Sends SIGTERM to the training on every worker, and waits until it has saved
and ended. Past the --grace that run was given, it is killed." ;;
    delete)
      about="Deletes the VM and what is on its disk.

  --yes   do not ask"
      example="delete --yes" ;;
    local)
      about="Trains in several processes on this machine, joined over a free port, and shows
what the first of them prints. A signal goes to all of them. When one fails the
others are stopped, and its exit code is this command's. When this script is killed
they save and end, within --grace. The command is echo-jax, or else ECHO_JAX_COMMAND.

  --processes N   how many (default: 2)
  --log-dir DIR   receives process-0.log, … (default: runs/logs)
  --grace S       seconds to save in, once stopped (default: 60)
  --dry-run       print every command, and change nothing"
      example="local --processes 2 -- --config configs/lm.py:tiny --workdir runs/lm" ;;
    *) die "there is no verb '$1'; see ./launch_tpu.sh --help" ;;
  esac
  printf 'usage: ./launch_tpu.sh %s [SETTINGS]\n\n%s\n\n' "$1" "$about"
  [[ $1 == local ]] || printf 'The settings are in ./launch_tpu.sh --help.\n\n'
  printf 'example:\n  ./launch_tpu.sh %s\n' "$example"
}

# -- Settings ---------------------------------------------------------------------

declare -A opt=([name]=echo-jax [grace]=60 [poll]=60 [worker]=0 [processes]=2 [log_dir]=runs/logs)
declare -a train_args=()
readonly SETTINGS="name project zone type version bucket grace poll gpu queued spot"
readonly SWITCHES="gpu queued spot dry_run watch follow yes"

is_in() { [[ " $2 " == *" $1 "* ]]; } # word, words

read_environment() {
  local key variable
  for key in $SETTINGS; do
    variable=ECHO_JAX_${key^^}
    opt[$key]=${!variable:-${opt[$key]:-}}
    if is_in "$key" "$SWITCHES" && [[ ${opt[$key]} == 0 ]]; then opt[$key]=; fi
  done
  for key in $SWITCHES; do opt[$key]=${opt[$key]:-}; done
}

read_flags() { # verb, what follows it
  local verb=$1 key known="$SETTINGS dry_run"
  case $verb in
    run) known+=" watch" ;;
    logs) known+=" follow worker" ;;
    delete) known+=" yes" ;;
    local) known="processes log_dir grace dry_run" ;;
  esac
  shift
  while (($#)) && [[ $1 != -- ]]; do
    key=${1%%=*} key=${key#--} key=${key//-/_}
    if [[ $1 != --* ]] || ! is_in "$key" "$known"; then
      die "$verb takes no '$1'; see ./launch_tpu.sh $verb --help"
    fi
    if is_in "$key" "$SWITCHES"; then
      [[ $1 != *=* ]] || die "${1%%=*} takes no value"
      opt[$key]=1
    elif [[ $1 == *=* ]]; then
      opt[$key]=${1#*=}
    else
      (($# > 1)) || die "$1 needs a value"
      opt[$key]=$2
      shift
    fi
    shift
  done
  (($# == 0)) || is_in "$verb" "run local" || die "$verb takes no '--'"
  train_args=("${@:2}")
}

check_settings() { # verb
  local key
  for key in grace poll processes; do
    check_number "--$key" "${opt[$key]}"
  done
  [[ ${opt[name]} =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ||
    die "--name=${opt[name]} is no name of a VM: take a-z, 0-9 and -"
  [[ -z ${opt[bucket]} || ${opt[bucket]} == gs://?* ]] ||
    die "--bucket=${opt[bucket]} is no bucket: it begins with gs://"
  [[ -z ${opt[gpu]} || -z ${opt[queued]} ]] ||
    die "--queued is for TPU VMs: leave it out, or --gpu"
  [[ -n ${opt[type]} || $1$2 != create && $1$2 != run1 ]] ||
    die "$1 makes a VM: add --type, such as v5litepod-16, or g2-standard-8 with --gpu"
  [[ ${#train_args[@]} -gt 0 || $1 != run && $1 != local ]] ||
    die "$1 needs the arguments of echo-jax train: add -- --config … --workdir …"
}

# -- Commands, run or shown -------------------------------------------------------

act() { # a command
  if [[ -n ${opt[dry_run]} ]]; then
    quoted "$@" >&3
  else
    "$@" </dev/null
  fi
}

remark() { printf '# %s\n' "$*"; }

verb_local() {
  local number port log command devices threads
  # Virtual CPU devices that wait for each other need two threads each.
  devices=${JAX_NUM_CPU_DEVICES:-1}
  check_number JAX_NUM_CPU_DEVICES "$devices"
  [[ ! ${XLA_FLAGS:-} =~ host_platform_device_count=0*([1-9][0-9]*) ]] || devices=${BASH_REMATCH[1]}
  threads=${NPROC:-$(getconf _NPROCESSORS_ONLN)}
  check_number NPROC "$threads"
  ((threads >= 2 * devices)) || threads=$((2 * devices))
  port=$(free_port)
  grace=${opt[grace]}
  # Behind "=" bash leaves "~" as it is.
  opt[log_dir]=${opt[log_dir]/#"~/"/"${HOME-}/"}
  act mkdir -p "${opt[log_dir]}"
  forward_signals
  if [[ -z ${opt[dry_run]} ]]; then
    # A resumed run appends to it: what is there already is not shown.
    log=${opt[log_dir]}/process-0.log
    touch "$log"
    exec 4<"$log"
    cat <&4 >/dev/null
  fi
  for ((number = 0; number < opt[processes]; number++)); do
    log=${opt[log_dir]}/process-$number.log
    command=(env "NPROC=$threads" "${ECHO_JAX_COMMAND:-echo-jax}" train "${train_args[@]}"
      "--config.distributed.coordinator=127.0.0.1:$port"
      "--config.distributed.num_processes=${opt[processes]}"
      "--config.distributed.process_id=$number")
    if [[ -n ${opt[dry_run]} ]]; then
      printf '%s >>%s 2>&1 &\n' "$(quoted "${command[@]}")" "$(quoted "$log")"
    else
      start_process "$number" "$log" "${command[@]}"
    fi
  done
  [[ -z ${opt[dry_run]} ]] || return 0
  say "${opt[processes]} processes; their logs are ${opt[log_dir]}/process-*.log; this is the first:"
  wait_for_all show_new
  [[ -z $first_failed ]] || tail -n 20 "${opt[log_dir]}/process-$first_failed.log" >&2
  return "$status"
}

# Free until the first process binds it, seconds later: Linux gives connections higher
# ones.
free_port() {
  python3 - <<'END'
import random, socket
while True:
    port = random.randrange(20000, 32768)
    try:
        socket.create_server(("127.0.0.1", port)).close()
        break
    except OSError:
        pass
print(port)
END
}

# From where it was read to; Ctrl-C, not meant for it, may end it early.
show_new() { cat <&4 || true; }

# -- The VM -----------------------------------------------------------------------

use_gcloud() {
  where=(${opt[project]:+"--project=${opt[project]}"} ${opt[zone]:+"--zone=${opt[zone]}"})
  resource=(gcloud compute tpus tpu-vm)
  reach=(gcloud compute tpus tpu-vm)
  [[ -z ${opt[queued]} ]] || resource=(gcloud compute tpus queued-resources)
  if [[ -n ${opt[gpu]} ]]; then
    resource=(gcloud compute instances)
    reach=(gcloud compute)
  fi
  [[ -n ${opt[dry_run]} ]] || command -v gcloud >/dev/null ||
    die "gcloud is not installed: see https://cloud.google.com/sdk/docs/install"
}

default_version() {
  case ${opt[type]} in
    v5litepod-*) echo v2-alpha-tpuv5-lite ;;
    v5p-*) echo v2-alpha-tpuv5 ;;
    v6e-*) echo v2-alpha-tpuv6e ;;
    v[234]-*) echo tpu-ubuntu2204-base ;;
    *-*-*) echo common-cu128-ubuntu-2204-nvidia-570 ;;
    *) die "--type=${opt[type]} has no default version: add --version" ;;
  esac
}

create_vm() {
  local version=${opt[version]} args spot=${opt[spot]:+--spot}
  [[ -n $version ]] || version=$(default_version) || exit
  if [[ -n ${opt[gpu]} ]]; then
    args=(--machine-type="${opt[type]}" --image-family="$version"
      --image-project=deeplearning-platform-release --boot-disk-size=200GB
      --maintenance-policy=TERMINATE --scopes=cloud-platform)
    # Stopped, not deleted: its disk stays.
    [[ -z $spot ]] || args+=(--provisioning-model=SPOT --instance-termination-action=STOP)
  elif [[ -n ${opt[queued]} ]]; then
    args=(--node-id="${opt[name]}" --accelerator-type="${opt[type]}"
      --runtime-version="$version" ${spot:+"$spot"})
  else
    args=(--accelerator-type="${opt[type]}" --version="$version" ${spot:+"$spot"})
  fi
  act "${resource[@]}" create "${opt[name]}" "${where[@]}" "${args[@]}"
}

delete_vm() {
  act "${resource[@]}" delete "${opt[name]}" "${where[@]}" ${opt[queued]:+--force} --quiet
}

clear_lost_vm() { # after a pre-emption: what is missing then is created
  if [[ -n ${opt[gpu]} ]]; then
    act "${resource[@]}" start "${opt[name]}" "${where[@]}" # Its disk is still there.
  else
    delete_vm
  fi
}

state_of_vm() { # prints the state as Google Cloud names it, or MISSING
  local field=state said
  [[ -z ${opt[gpu]} ]] || field=status
  [[ -z ${opt[queued]} ]] || field=state.state
  if said=$(act "${resource[@]}" describe "${opt[name]}" "${where[@]}" "--format=value($field)" 2>&1); then
    grep -xE '[A-Z_]+' <<<"$said" || [[ -n ${opt[dry_run]} ]]
  elif [[ $said == *"was not found"* ]]; then
    echo MISSING
  else
    say "$said"
    return 1
  fi
}

# -- Its workers ------------------------------------------------------------------

on_workers() { # which, command
  local which=("--worker=$1")
  [[ -z ${opt[gpu]} ]] || which=() # It has one.
  act "${reach[@]}" ssh "${opt[name]}" "${where[@]}" "${which[@]}" --quiet "--command=$2"
}

call_workers() { # which, what of launch_worker.sh, its arguments
  on_workers "$1" "$(quoted bash "$THERE/launch_worker.sh" "${@:2}")"
}

state_of_workers() { # prints a line for each
  local said
  said=$(on_workers all "bash $THERE/launch_worker.sh state || echo worker \$(hostname) new") || return
  grep '^worker ' <<<"$said" || [[ -n ${opt[dry_run]} ]]
}

build_bundle() { # what a worker needs: a folder, and the same as an archive
  bundle=dist/launch/${opt[name]}
  act rm -rf "$bundle"
  act mkdir -p "$bundle"
  act python3 -m pip wheel --quiet --no-deps --wheel-dir "$bundle" .
  act cp -R configs launch_worker.sh "$bundle"
  act find "$bundle" -name __pycache__ -prune -exec rm -rf '{}' +
  act tar -czf "$bundle.tgz" -C "$bundle" .
}

install_bundle() {
  local installed which=(--worker=all) extra=tpu
  if [[ -n ${opt[gpu]} ]]; then which=() extra=cuda; fi
  installed=$(on_workers all "cat $THERE/installed || echo new") || return
  if [[ -z ${opt[dry_run]} && $(sort -u <<<"$installed") == "$(content_hash "$bundle")" ]]; then
    say "${opt[name]} has this installed already"
    return
  fi
  act "${reach[@]}" scp "$bundle.tgz" "${opt[name]}:$THERE.tgz" "${where[@]}" "${which[@]}" --quiet &&
    on_workers all "rm -rf $THERE/new && mkdir -p $THERE/new && tar -xzf $THERE.tgz -C $THERE/new && bash $THERE/new/launch_worker.sh install $extra"
}

start_training() {
  local to=${opt[bucket]:+${opt[bucket]%/}/${opt[name]}}
  call_workers all start "${opt[grace]}" "${opt[poll]}" "$to" "${train_args[@]}"
}

refuse_running_vm() { # lines of its workers
  ! grep -E '^worker [^ ]+ running ' <<<"$1" >&2 ||
    die "${opt[name]} is running: wait for it, or ./launch_tpu.sh stop --name=${opt[name]}"
}

runs_this() { # lines of its workers; whether all run just this command
  local line command
  command=$(quoted echo-jax train "${train_args[@]}")
  while read -r line; do
    [[ $line == *" running "* && ${line#worker * running * } == "$command" ]] || return
  done <<<"$1"
}

# -- Watching ---------------------------------------------------------------------

verdict() { # lines of the workers
  # Prints stopped | failed CODE | again | resume | wait | finished.
  local state code running='' saved='' failed='' again=''
  while read -r _ _ state code _; do
    case "$state $code" in
      stopped*) echo stopped && return ;;
      running*) running=1 ;;
      'ended 0') ;;
      'ended 129' | 'ended 130' | 'ended 138' | 'ended 140' | 'ended 143') saved=1 ;;
      'ended 75') again=1 ;; # It may go well another time, but not for ever.
      ended*) failed=${failed:-$code} ;;
      *) saved=1 ;; # new, idle, lost: it should run, and does not.
    esac
  done <<<"$1"
  if [[ -n $failed ]]; then
    echo "failed $failed"
  elif [[ -n $again ]]; then
    echo again
  elif [[ -n $saved ]]; then
    echo resume
  elif [[ -n $running ]]; then
    echo wait
  else
    echo finished
  fi
}

resume() {
  install_bundle || return
  # On the other workers it may still wait for one that has ended.
  [[ -z $started ]] || call_workers all stop '' || return
  start_training || return
  say "started; ./launch_tpu.sh logs --follow --name=${opt[name]} shows what it prints"
  started=1 failures=0
}

watch_workers() { # one look at a VM that is there; sets result when it is the last
  local states judged suspected=$suspect
  suspect=
  states=$(state_of_workers) || states=
  judged=$(verdict "$states")
  if [[ -z $started ]] && runs_this "$states"; then
    say "${opt[name]} runs this already: watching it"
    started=1
  elif [[ -z $started ]]; then
    refuse_running_vm "$states"
    judged=resume # What has run there before is not ours.
  fi
  case $judged in
    finished) result=0 ;;
    stopped) result=143 ;;
    wait) failures=0 ;;
    resume) [[ -n $states ]] && resume || failures=$((failures + 1)) ;;
    again)
      if ((tries == MAX_FAILURES)); then
        result=75
        call_workers all stop '' >&2 || true
      elif resume; then
        tries=$((tries + 1))
        say "it had ended with exit code 75: try $tries of $MAX_FAILURES"
      else
        failures=$((failures + 1))
      fi
      ;;
    failed*)
      # Who loses peers to a pre-emption fails, too, and the VM's state may tell
      # of it later: look twice.
      suspect=1
      [[ -n $suspected ]] || return 0
      result=${judged#failed }
      call_workers all stop '' >&2 || true
      ;;
  esac
}

watch() {
  local vm seen='' started='' suspect='' replacing='' failures=0 tries=1 result=''
  [[ -n ${opt[gpu]} ]] ||
    say "a pre-empted TPU VM loses its disk: training goes on if --workdir is in a bucket, or on another one"
  build_bundle
  while [[ -z $result ]] && ((failures < MAX_FAILURES)); do
    vm=$(state_of_vm) || vm=UNKNOWN
    case $vm in
      READY | ACTIVE | RUNNING)
        seen=1 replacing=''
        watch_workers
        ;;
      PREEMPTED | TERMINATED | SUSPENDED | FAILED)
        say "${opt[name]} is $vm: making it again"
        suspect='' replacing=1
        # A queued resource may be FAILED for what is asked of it.
        [[ $vm != FAILED ]] || failures=$((failures + 1))
        clear_lost_vm || true
        ;;
      MISSING)
        [[ -z $seen || -n $replacing ]] ||
          die "${opt[name]} was deleted, not pre-empted: the same command makes it again"
        create_vm || { [[ -n $replacing ]] && say "again in ${opt[poll]} s"; } || exit 1
        ;;
      UNKNOWN) failures=$((failures + 1)) ;;
      *) say "${opt[name]} is $vm" ;;
    esac
    [[ -n $result ]] || sleep "${opt[poll]}"
  done
  case ${result:-none} in
    none) say "$failures failures in a row: given up" && return 1 ;;
    0) say "finished" ;;
    143) say "stopped, as asked; the same command resumes" ;;
    *) say "failed with exit code $result, and is not run again; see ./launch_tpu.sh logs" ;;
  esac
  return "$result"
}

show_watch() {
  state_of_vm
  remark "if it is missing:"
  create_vm
  remark "then:"
  build_bundle
  state_of_workers
  install_bundle
  start_training
  remark "every ${opt[poll]} s, until it ends:"
  state_of_vm
  state_of_workers
  remark "after a pre-emption, and then as above:"
  clear_lost_vm
}

# -- Verbs ------------------------------------------------------------------------

verb_create() { create_vm; }

verb_setup() {
  build_bundle
  install_bundle
}

verb_run() {
  local states
  if [[ -z ${opt[watch]} ]]; then
    states=$(state_of_workers)
    refuse_running_vm "$states"
    start_training
  elif [[ -n ${opt[dry_run]} ]]; then
    show_watch
  else
    watch
  fi
}

verb_logs() {
  call_workers "${opt[worker]}" logs "${opt[follow]:+follow}" && return
  [[ -z ${opt[bucket]} ]] || say "copies are in ${opt[bucket]%/}/${opt[name]}/"
  return 1
}

verb_status() {
  local state
  state=$(state_of_vm)
  [[ -n ${opt[dry_run]} ]] || printf '%s %s\n' "${opt[name]}" "$state"
  case ${state:-READY} in
    READY | ACTIVE | RUNNING) state_of_workers ;;
  esac
}

verb_stop() { call_workers all stop mark; }

verb_delete() {
  local answer=''
  if [[ -z ${opt[yes]} && -z ${opt[dry_run]} ]]; then
    read -r -p "Delete ${opt[name]} and what is on its disk? [y/N] " answer || true
    [[ $answer == [yY]* ]] || die "${opt[name]} is not deleted: answer y, or add --yes"
  fi
  delete_vm
}

main() {
  local argument
  case ${1:-} in
    '') usage >&2 && exit 2 ;;
    --help | -h) usage && return ;;
  esac
  usage_of "$1" >/dev/null # Is there such a verb?
  for argument; do
    [[ $argument != -- ]] || break
    if [[ $argument == --help ]]; then usage_of "$1" && return; fi
  done
  read_environment
  read_flags "$@"
  check_settings "$1" "${opt[watch]}"
  # What --dry-run prints goes to 3, also from within $(…).
  if [[ -n ${opt[dry_run]} ]]; then exec 3>&1; fi
  if [[ $1 != local ]]; then
    cd "$(dirname "${BASH_SOURCE[0]}")"
    use_gcloud
  fi
  "verb_$1"
}

main "$@"
