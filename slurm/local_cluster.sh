#!/usr/bin/env bash
# A real one-node SLURM on this machine, for tests and for trying sweeps out: munged, slurmctld, slurmd, CPUs as the
# resource, partition `main` and partition `urgent`, whose jobs preempt those of `main`. It touches no SLURM that this
# machine may already have: own configuration, key, sockets, ports and state, all below one folder.
#
#   slurm/local_cluster.sh start [FOLDER]      # default: ~/.cache/otb/slurm; prints the line that points a shell at it
#   slurm/local_cluster.sh stop [FOLDER]
#   slurm/local_cluster.sh restart-controller [FOLDER]
#
# Needs the packages slurm-wlm and munge. OTB_CLUSTER_CPUS=N offers N CPUs instead of those that there are.
set -euo pipefail
command=${1:-}
folder=$(realpath -m "${2:-${XDG_CACHE_HOME:-$HOME/.cache}/otb/slurm}")
export SLURM_CONF=$folder/slurm.conf
PATH=$PATH:/usr/sbin:/sbin

die() { echo "local_cluster.sh: $*" >&2; exit 1; }

free_ports() { # as many as asked for, free at this moment
  python3 -c "import socket, sys
sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))" "$1"
}

alive() { # a zombie is not: the first process of a container seldom asks how others ended
  [ -e "/proc/$1" ] && ! grep -q '^State:.Z' "/proc/$1/status" 2>/dev/null
}

running() { # the process that a pid file names
  [ -s "$folder/$1.pid" ] && alive "$(cat "$folder/$1.pid")"
}

end() { # SIGTERM, then SIGKILL after a minute
  running "$1" || return 0
  local pid; pid=$(cat "$folder/$1.pid")
  kill "$pid"
  for _ in $(seq 600); do alive "$pid" || return 0; sleep 0.1; done
  kill -9 "$pid"
}

end_jobs() { # what outlived the daemons would keep the node from coming back
  scancel --user="$(id -un)" 2> /dev/null || true
  for _ in $(seq 300); do
    [ -n "$(squeue --noheader 2> /dev/null)" ] || return 0
    sleep 0.2
  done
}

write_configuration() {
  local host user ports cpus memory
  host=$(hostname -s) user=$(id -un) ports=($(free_ports 2))
  cpus=${OTB_CLUSTER_CPUS:-$(env -u OMP_NUM_THREADS nproc)} # nproc prints OMP_NUM_THREADS where it is set
  memory=$(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
  cat > "$SLURM_CONF" <<END
ClusterName=otb
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again; 120 s by default
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
# no cgroups: they need privileges that a container lacks
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
# generous, so that a busy machine has the time to write a checkpoint; whoever is done sooner is not waited for
KillWait=120
MessageTimeout=60
MinJobAge=60
OverTimeLimit=0
MaxArraySize=2001
MaxJobCount=10000
# job ids give the ports of runs of several processes: two clusters on one machine must not begin alike
FirstJobId=$((100 * (ports[0] % 190) + 1))
SlurmdParameters=config_overrides
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=urgent Nodes=$host MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
END
}

start_munged() {
  [ -s "$folder/munge.key" ] || (umask 077; head -c 1024 /dev/urandom > "$folder/munge.key")
  # --force: a state folder below /tmp is allowed too
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>> "$folder/munged.log"
}

wait_until_idle() {
  for _ in $(seq 1500); do
    sinfo --noheader --format=%T 2>/dev/null | grep -q -E "idle|mixed|allocated" && return
    sleep 0.2
  done
  tail -n 20 "$folder"/slurmctld.log "$folder"/slurmd.log >&2
  die "the node did not come up within 5 minutes; the ends of the logs in $folder are above."
}

start() {
  for program in munged slurmctld slurmd sinfo; do
    command -v "$program" > /dev/null || die "$program is not installed. Run: apt-get install slurm-wlm munge"
  done
  [ ${#folder} -le 90 ] || die "$folder is too long for a socket's path (90 characters). Give a shorter FOLDER."
  running slurmctld && die "a cluster runs in $folder already. Run: export SLURM_CONF=$SLURM_CONF"
  mkdir -p "$folder/state" "$folder/spool"
  chmod 755 "$folder"
  write_configuration
  start_munged
  slurmctld
  slurmd
  wait_until_idle
  echo "export SLURM_CONF=$SLURM_CONF"
}

case $command in
  start) start ;;
  stop)
    [ -f "$SLURM_CONF" ] || die "no cluster in $folder."
    if running slurmctld; then end_jobs; fi
    for daemon in slurmd slurmctld munged; do end "$daemon"; done
    ;;
  restart-controller)
    end slurmctld
    slurmctld
    wait_until_idle
    ;;
  *) die "'$command' is none of start, stop, restart-controller." ;;
esac
