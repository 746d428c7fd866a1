#!/usr/bin/env bash
# Starts, watches and stops `echo-jax train`: on a worker of a VM, where
# launch_tpu.sh calls it over ssh, and on this machine for `launch_tpu.sh local`.
#
# On a worker everything is in the folder that this file is in:
#   installed            hash of what setup brought; written last
#   configs/  venv/      what training needs
#   run/train.log        what it prints
#   run/pid              of the process that watches it; SIGTERM there stops it
#   run/exit_code        how it ended; missing while it runs
set -euo pipefail

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

die() { # what is wrong, and the fix
  say "$1"
  exit 2
}

# Before any arithmetic: there bash runs what stands in the brackets of a text like a[$(…)].
check_number() { # what it is called, the value
  [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1=$2 is no whole number above 0"
}

((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] >= 404)) ||
  die "bash $BASH_VERSION is too old: install bash 4.4 or newer"

quoted() { # words; prints them as a line that bash reads as these words
  local word line=
  for word; do
    [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word=${word@Q}
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

content_hash() { # folder; prints a hash of the names and contents of its files
  (cd "$1" && find . -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum) |
    sha256sum | cut -d ' ' -f 1
}

# -- Processes --------------------------------------------------------------------

grace=60 # Seconds from the first signal until what still lives is killed.
declare -a pids=() # Number of a process that lives -> its id, also its group's.
deadline=
to_guard='' # A descriptor.
starting='' pending='' # Whether a process is being started; a signal that came meanwhile.
status=0 # The first exit code that is not 0, and whose it is.
first_failed=

guard() { # whose; reads "+ PID" and "- PID", and at the end ends what is left
  local sign pid
  local -A left=()
  # Signals are for the script; and who reads what it says may be gone with it.
  trap '' TERM INT HUP USR1 USR2 PIPE
  while read -r sign pid; do
    if [[ $sign == + ]]; then left[$pid]=1; else unset "left[$pid]"; fi
  done
  ((${#left[@]})) || return 0
  say "process $1 was killed: ends what it has started, within $grace s" || true
  deadline=$((SECONDS + grace))
  kill -TERM "${!left[@]}" 2>/dev/null || true
  while ((SECONDS <= deadline)) && kill -0 "${!left[@]}" 2>/dev/null; do
    sleep 0.2
  done
  for pid in "${!left[@]}"; do kill_group "$pid"; done
}

start_guard() { # so that nothing is left behind where this script is killed
  # In a group of its own, so that it is not killed with it. It sees the end of the
  # script by the end of its input, which nobody else keeps open.
  set -m
  coproc GUARD { guard $$; }
  set +m
  exec {to_guard}>&"${GUARD[1]}"
}

start_process() { # number, log file, command
  local number=$1 log=$2
  # A signal may come before all are started.
  [[ -z $deadline ]] || return 0
  [[ -n $to_guard ]] || start_guard
  starting=1
  # Job control gives it a group of its own, and Ctrl-C its usual meaning.
  set -m
  # It tells the guard itself, so that there is no moment at which nobody has.
  (
    echo "+ $BASHPID" >&"$to_guard"
    exec {to_guard}>&-
    exec "${@:3}"
  ) >>"$log" 2>&1 </dev/null &
  set +m
  pids[number]=$!
  starting=''
  [[ -z $pending ]] || forward "$pending"
}

forward() { # signal
  local pid
  # It would not reach the process that has just been started.
  if [[ -n $starting ]]; then
    pending=$1
    return
  fi
  [[ -n $deadline ]] || deadline=$((SECONDS + grace))
  for pid in "${pids[@]}"; do
    kill "-$1" "$pid" 2>/dev/null || true
  done
}

forward_signals() {
  trap 'forward TERM' TERM HUP USR1 USR2
  trap 'forward INT' INT
}

kill_group() { kill -KILL -- "-$1" 2>/dev/null || true; } # process group

end_job() { # id of a process, also its group's; ends it without a word of bash's own
  {
    kill_group "$1"
    wait "$1"
  } 2>/dev/null || true
}

wait_for_all() { # what to do at every look; sets status and first_failed
  # Stops the others when one fails.
  local number
  while ((${#pids[@]})); do
    # wait -n would miss a process that ends just before it. Ctrl-C ends the sleep, too,
    # and is no failure of it.
    sleep 0.2 || true
    for number in "${!pids[@]}"; do
      kill -0 "${pids[$number]}" 2>/dev/null || ended "$number"
    done
    # Last, so that it sees what they printed before they ended.
    "$@"
    if [[ -n $deadline ]] && ((SECONDS > deadline)); then
      for number in "${!pids[@]}"; do
        say "process $number has not ended within $grace s: killed"
        kill_group "${pids[$number]}"
      done
    fi
  done
}

ended() { # number of a process
  local code=0
  wait "${pids[$1]}" || code=$?
  # Processes of its own, if it left any.
  kill_group "${pids[$1]}"
  echo "- ${pids[$1]}" >&"$to_guard"
  unset "pids[$1]"
  say "process $1 ended with exit code $code"
  if ((code && !status)); then
    status=$code
    # shellcheck disable=SC2034 # launch_tpu.sh reads it.
    first_failed=$1
    [[ -n $deadline ]] || forward TERM
  fi
}

# -- On a worker ------------------------------------------------------------------

# Shared, for several may look at once.
locked() { [[ -e run/lock ]] && ! flock -s -n run/lock true; }

worker_state() { # prints: worker HOST STATE …
  # Training may end meanwhile. So what changes last is looked at first: its end is
  # run/stopped if that was asked for, then run/exit_code, then a free lock.
  local state=idle code held=''
  ! locked || held=1
  if [[ ! -e installed ]]; then
    state=new
  elif code=$(cat run/exit_code 2>/dev/null); then
    state="ended $code"
    [[ ! -e run/stopped ]] || state="stopped $code"
  elif [[ -n $held ]] && has_pid; then
    state="running $(<run/pid) $(<run/command)"
  elif [[ -e run/pid ]]; then
    state=lost
  fi
  printf 'worker %s %s\n' "$(hostname)" "$state"
}

has_pid() { # waits for it, where training is just being started
  until [[ -e run/pid ]]; do
    locked || return
    sleep 0.2
  done
}

refuse_running() { # and wait until what has ended is gone
  local state
  while locked; do
    state=$(worker_state)
    [[ $state != *" running "* ]] || die "$state: stop it first"
    sleep 0.2
  done
}

worker_install() { # extra; called in the folder new, for the one above
  local hash wheel
  hash=$(content_hash .)
  cd ..
  refuse_running
  rm -f installed
  # The Python of the images is too old; uv brings one.
  [[ -x bin/uv ]] || curl -LsSf https://astral.sh/uv/install.sh |
    env UV_UNMANAGED_INSTALL="$PWD/bin" sh
  [[ -x venv/bin/python ]] || bin/uv venv --python 3.12 venv
  wheel=$(echo "$PWD"/new/echo_jax-*.whl)
  bin/uv pip install --python venv/bin/python --reinstall-package echo-jax \
    "echo-jax[$1,gcs] @ file://$wheel"
  rm -rf configs
  mv new/configs new/launch_worker.sh .
  echo "$hash" >installed.part
  mv installed.part installed
}

worker_start() { # grace, seconds between copies, a bucket's folder or '', arguments
  [[ -e installed ]] || die "$(hostname) is not set up: ./launch_tpu.sh setup"
  check_number --grace "$1"
  mkdir -p run
  # Whoever holds the lock runs. What it starts holds it, too; a restart frees it.
  exec 9>>run/lock
  until flock -n 9; do refuse_running; done
  # The exit code last: without it, what is there is of this run.
  rm -f run/stopped run/pid run/exit_code
  quoted echo-jax train "${@:4}" >run/command
  printf '== %s %s\n' "$(date -Is)" "$(<run/command)" >>run/train.log
  set -m
  nohup bash launch_worker.sh supervise "$@" >>run/train.log 2>&1 </dev/null &
  set +m
  # From then on it can be stopped.
  while [[ ! -e run/pid ]] && kill -0 $! 2>/dev/null; do sleep 0.2; done
  [[ -e run/pid ]] || die "$(hostname) did not start it: see run/train.log"
}

worker_supervise() { # as worker_start
  local to=${3:+$3/$(hostname)} copier
  check_number --grace "$1"
  grace=$1
  export PATH=$PWD/venv/bin:$PATH
  forward_signals
  echo $$ >run/pid.part
  mv run/pid.part run/pid
  start_process 0 run/train.log echo-jax train "${@:4}"
  if [[ -n $to ]]; then
    set -m
    while sleep "$2"; do copy_logs "$to"; done 9>&- {to_guard}>&- &
    set +m
    copier=$!
  fi
  wait_for_all :
  echo "$status" >run/exit_code.part
  mv run/exit_code.part run/exit_code
  if [[ -n $to ]]; then
    end_job "$copier"
    copy_logs "$to"
  fi
}

copy_logs() { # folder in a bucket; training goes on if it fails
  gcloud storage rsync --recursive run "$1" >>run/copies.log 2>&1 </dev/null || true
}

worker_stop() { # mark or '': whether --watch should see that the user wished it
  if [[ ! -e run/exit_code ]] && locked; then
    [[ -z $1 ]] || touch run/stopped
    # It may end by itself just now.
    ! has_pid || kill -TERM "$(<run/pid)" 2>/dev/null || true
    while [[ ! -e run/exit_code ]] && locked; do sleep 0.2; done
  fi
  worker_state
}

worker_logs() { # follow or ''
  exec tail -n 100 ${1:+-F} run/train.log
}

if [[ ${BASH_SOURCE[0]} == "$0" ]]; then
  cd "$(dirname "$0")"
  "worker_$1" "${@:2}"
fi
