#!/usr/bin/env bash
# A real SLURM with one node on this machine, for tests and for trying out sweeps: munged, slurmctld and slurmd, with
# CPUs as the resource. Jobs of partition `urgent` preempt jobs of partition `main`. It does not touch another SLURM on
# this machine: its configuration, key, sockets, ports and state are its own, all below one folder.
#
#   slurm/local_cluster.sh start [FOLDER]      # default: ~/.cache/otb/slurm; prints the export line for a shell
#   slurm/local_cluster.sh stop [FOLDER]
#   slurm/local_cluster.sh restart-controller [FOLDER]
#
# Needs the packages slurm-wlm and munge. OTB_CLUSTER_CPUS=N offers N CPUs per node instead of the real number,
# OTB_CLUSTER_NODES=2 offers two nodes, both on this machine.
set -euo pipefail
command=${1:-}
folder=$(realpath -m "${2:-${XDG_CACHE_HOME:-$HOME/.cache}/otb/slurm}")
export SLURM_CONF=$folder/slurm.conf
nodes=${OTB_CLUSTER_NODES:-1}
[ "$command" = start ] || nodes=$(grep -c ^NodeName= "$SLURM_CONF" || true)
PATH=$PATH:/usr/sbin:/sbin

die() { echo "local_cluster.sh: $*" >&2; exit 1; }

free_ports() { # prints $1 ports that are free at this moment
  python3 -c "import socket, sys
sockets = [socket.create_server(('127.0.0.1', 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))" "$1"
}

alive() { # a zombie counts as dead: the first process of a container seldom reaps others
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

end_jobs() { # jobs that outlive the daemons would keep the node from restarting
  scancel --user="$(id -un)" 2> /dev/null || true
  for _ in $(seq 300); do
    [ -n "$(squeue --noheader 2> /dev/null)" ] || return 0
    sleep 0.2
  done
}

write_configuration() {
  local host user ports cpus memory number
  host=$(hostname -s) user=$(id -un) ports=($(free_ports $((nodes + 1))))
  cpus=${OTB_CLUSTER_CPUS:-$(env -u OMP_NUM_THREADS nproc)} # nproc prints OMP_NUM_THREADS if it is set
  memory=$(awk '/MemTotal/ {print int($2 / 1024)}' /proc/meminfo)
  cat > "$SLURM_CONF" <<END
ClusterName=otb
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
# cred_expire is also how long a requeued job waits before it starts again; 120 s by default
AuthInfo=socket=$folder/munge.socket,cred_expire=5
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
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
# generous, so that a busy machine has time to write a checkpoint; SLURM does not wait for jobs that end sooner
KillWait=120
MessageTimeout=60
MinJobAge=60
OverTimeLimit=0
MaxArraySize=2001
MaxJobCount=10000
# ports of runs with several processes depend on job ids, so two clusters on one machine must start with different ids
FirstJobId=$((100 * (ports[0] % 190) + 1))
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF
END
  for number in $(seq "$nodes"); do
    echo "NodeName=node$number NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[$number]} CPUs=$cpus \
RealMemory=$((memory / nodes)) State=UNKNOWN" >> "$SLURM_CONF"
  done
}

start_munged() {
  [ -s "$folder/munge.key" ] || (umask 077; head -c 1024 /dev/urandom > "$folder/munge.key")
  # --force: a state folder below /tmp is allowed too
  munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
    --log-file="$folder/munged.log" --seed-file="$folder/munged.seed" 2>> "$folder/munged.log"
}

wait_until_idle() {
  local up
  for _ in $(seq 1500); do
    up=$(sinfo --noheader --Node --partition=main --format=%T 2> /dev/null | grep -c -E "idle|mixed|allocated" || true)
    [ "$up" = "$nodes" ] && return
    sleep 0.2
  done
  tail -n 20 "$folder"/slurmctld.log "$folder"/slurmd-*.log >&2
  die "not every node started within 5 minutes; the ends of the logs in $folder are above."
}

start() {
  for program in munged slurmctld slurmd sinfo; do
    command -v "$program" > /dev/null || die "$program is not installed. Run: apt-get install slurm-wlm munge"
  done
  [ ${#folder} -le 90 ] || die "$folder is too long for the path of a socket (90 characters). Give a shorter FOLDER."
  running slurmctld && die "a cluster runs in $folder already. Run: export SLURM_CONF=$SLURM_CONF"
  mkdir -p "$folder/state"
  chmod 755 "$folder"
  write_configuration
  start_munged
  slurmctld
  for number in $(seq "$nodes"); do slurmd -N "node$number"; done
  wait_until_idle
  echo "export SLURM_CONF=$SLURM_CONF"
}

case $command in
  start) start ;;
  stop)
    [ -f "$SLURM_CONF" ] || die "no cluster in $folder."
    if running slurmctld; then end_jobs; fi
    for number in $(seq "$nodes"); do end "slurmd-node$number"; done
    for daemon in slurmctld munged; do end "$daemon"; done
    ;;
  restart-controller)
    end slurmctld
    slurmctld
    wait_until_idle
    ;;
  *) die "'$command' is not one of start, stop, restart-controller." ;;
esac
