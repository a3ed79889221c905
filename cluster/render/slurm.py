"""Render a batch script for Slurm. The fleet runs as long as the job.

One pool is a plain job; several pools are the components of a heterogeneous job. The batch script runs on the first
node of the first pool. It starts Ray's head there, then, on every node, a watchdog that restarts Ray if it ends, and
last Polyfleet's server. Text from users is quoted in the script, or is one checked shell word.
"""

import shlex

from cluster.fleet.engine_spec import SlurmFleet, SlurmPool
from cluster.fleet.fleet_spec import FleetSpec
from cluster.render.shapes import Shape, environment_name, missing_field, other_storages, settings, shapes, storages
from cluster.version import VERSION

NEEDED = ("cpus",)
NOTICE_S = 90
"""Slurm signals the script this long before its time limit, so that jobs save: they have 30 s, and Slurm's signal may
be 60 s late.
"""

HEAD = r"""
set -euo pipefail
POLYFLEET_UMASK=$(printf %03o $(($(umask) | 2)))  # of jobs' own files
export POLYFLEET_UMASK
umask 077
mkdir -p "$folder/home"
token=$folder/ray-token
[ -s "$token" ] || head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' > "$token"
chmod 600 "$token"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$token
if [ -n "${POLYFLEET_CODE:-}" ]; then export PYTHONPATH=$POLYFLEET_CODE; fi

export POLYFLEET_BATCH=$SLURM_JOB_ID
own=/tmp/pf-$SLURM_JOB_ID-head
mkdir -m 700 "$own"
ip=${POLYFLEET_HEAD_IP:-$(hostname -I | cut -d' ' -f1)}
port=$((20000 + SLURM_JOB_ID % 20000))
export POLYFLEET_RAY_ADDRESS=$ip:$port

polyfleet() { POLYFLEET_HOME=$folder/home "$python" -m orchestrator.cli "$@"; }
ray_head=
nodes=()
# Nodes stop first: their jobs save while the server still runs. Only the watchdogs get a signal: Slurm's own signals,
# and those of an srun that is stopped, go to all processes of a node at once, and nothing would be left to save jobs.
read -r -d '' ending <<'ENDING' || true
for watchdog in /tmp/pf-"$POLYFLEET_BATCH"-*/watchdog; do
  if mv "$watchdog" "$watchdog.stopping" 2>/dev/null; then kill -TERM "$(cat "$watchdog.stopping")"; fi
done
ENDING
stop() {
  trap '' TERM INT
  trap - EXIT
  [ ${#nodes[@]} -eq 0 ] || srun "${everywhere[@]}" bash -c "$ending" || true
  for node in "${nodes[@]}"; do wait "$node" || true; done
  polyfleet down || true
  [ -z "$ray_head" ] || kill -TERM "$ray_head" 2>/dev/null || true
  wait "$ray_head" 2>/dev/null || true
  rm -rf "$own"
}
trap stop EXIT
trap 'exit 143' TERM INT

"$python" -m ray.scripts.scripts start --head --block --node-ip-address="$ip" --port="$port" --temp-dir="$own/ray" \
  --num-cpus=0 --num-gpus=0 --include-dashboard=false --labels=polyfleet.io/role=head &
ray_head=$!
for ((i = 0; i < 600; i++)); do
  if (: < "/dev/tcp/$ip/$port") 2>/dev/null; then break; fi
  kill -0 "$ray_head" || { echo "Ray's head ended before it listened" >&2; exit 1; }
  sleep 0.2
done

# This runs on each node: Ray, restarted if it ends before the job.
read -r -d '' watchdog <<'WATCHDOG' || true
own=/tmp/pf-$POLYFLEET_BATCH-$POLYFLEET_POOL-$SLURM_PROCID
mkdir -m 700 "$own" || exit 1
export POLYFLEET_NODE=$POLYFLEET_POOL-$SLURM_PROCID POLYFLEET_NODE_DIR=$own/node POLYFLEET_HOME=$own/home
if [ -n "${ROCR_VISIBLE_DEVICES:-}" ]; then  # Ray reads AMD's other variable
  export HIP_VISIBLE_DEVICES=$ROCR_VISIBLE_DEVICES
  unset ROCR_VISIBLE_DEVICES
fi
ended= ray=
trap 'ended=1; [ -z "$ray" ] || kill -TERM "$ray" 2>/dev/null' TERM INT
echo $$ > "$own/watchdog"
while [ -z "$ended" ]; do
  "$@" --temp-dir="$own/ray" --labels="$POLYFLEET_LABELS,polyfleet.io/node=$POLYFLEET_NODE" &
  ray=$!
  while kill -0 "$ray" 2>/dev/null; do wait "$ray" || true; done
  ray=
  if [ -z "$ended" ]; then sleep 5 & wait $! || true; fi
done
rm -rf "$own"
WATCHDOG
"""

END = r"""
polyfleet up --address "$POLYFLEET_RAY_ADDRESS"
echo "Fleet up. On this machine: POLYFLEET_HOME=$folder/home $python -m orchestrator.cli status"
for node in "${nodes[@]}"; do wait "$node" || true; done
"""


def render(fleet: FleetSpec) -> tuple[str, list[str]]:
    """Return the script, and remarks for the user. Raises SpecError."""
    slurm = fleet.slurm
    if slurm is None:
        raise missing_field(
            "slurm", "a batch script", "name a folder that all nodes see, e.g. slurm: {folder: /shared/me/polyfleet}"
        )
    pool_shapes = shapes(fleet, NEEDED)
    python = _interpreter(fleet)
    parts = [_preface(fleet.name, slurm), _options(fleet.name, slurm, pool_shapes)]
    parts.append(f"\nfolder={shlex.quote(slurm.folder)}\npython={shlex.quote(python)}")
    parts.append("\n".join(f"export {name}={shlex.quote(value)}" for name, value in sorted(settings().items())))
    parts.append(f"everywhere=({_srun_options(len(pool_shapes))})")
    parts.append(HEAD.rstrip("\n"))
    folders = storages(fleet, f"{slurm.folder}/storage")
    parts += [_nodes(number, shape, len(pool_shapes), folders) for number, shape in enumerate(pool_shapes)]
    return "\n".join(parts) + END, []


def _srun_options(pools: int) -> str:
    """Return the options of an srun that runs once on each node of the job."""
    components = f"'--het-group={','.join(map(str, range(pools)))}' " if pools > 1 else ""
    return f"{components}--ntasks-per-node=1 --cpus-per-task=1 --mem=0 --gres=none --overlap"


def _interpreter(fleet: FleetSpec) -> str:
    """Return the Python of the first pool, in which the head and the server run too."""
    for name, pool in fleet.pools.items():
        if not pool.environment.interpreter.startswith("/"):
            raise missing_field(
                f"pools.{name}.environment", "a batch script",
                "name a Python that all nodes see and that has Ray and Polyfleet: {interpreter: /shared/env/bin/python}"
            )  # fmt: skip
    return next(iter(fleet.pools.values())).environment.interpreter


def _preface(name: str, slurm: SlurmFleet) -> str:
    return f"""#!/bin/bash
# Fleet {name}, rendered by Polyfleet {VERSION}. It runs as long as this job. Jobs and checkpoints are stored in
# {slurm.folder}; jobs continue in the next Slurm job.
#
#   mkdir -p -m 700 {slurm.folder} && sbatch THIS_FILE
#
# The pools' Pythons must have Ray and Polyfleet {VERSION}. If Polyfleet is not installed, set POLYFLEET_CODE to the
# folder with its code. If nodes cannot reach the machine's first address, set POLYFLEET_HEAD_IP to another. Ray's
# token is created in that folder, readable by you alone."""


def _options(name: str, slurm: SlurmFleet, pool_shapes: list[Shape]) -> str:
    common = {
        "job-name": f"polyfleet-{name}",
        "dependency": "singleton",
        "output": f"{slurm.folder}/slurm-%j.log",
        "signal": f"B:TERM@{NOTICE_S}",
        "time": slurm.time,
        "account": slurm.account,
        "qos": slurm.qos,
        "reservation": slurm.reservation,
    }
    # Components need different names: by `singleton`, one would wait for another of the same name.
    names = [{}, *({"job-name": f"polyfleet-{name}-{shape.pool}"} for shape in pool_shapes[1:])]
    blocks = [_lines(name_option | _pool_options(shape)) for name_option, shape in zip(names, pool_shapes, strict=True)]
    return "\n".join([_lines(common), "\n#SBATCH hetjob\n".join(blocks)])


def _lines(options: dict[str, str]) -> str:
    return "\n".join(f"#SBATCH --{name}={value}" for name, value in options.items() if value)


def _pool_options(shape: Shape) -> dict[str, str]:
    options = shape.spec.slurm or SlurmPool()
    min_nodes = max(1, shape.min_nodes)
    nodes = str(shape.max_nodes) if min_nodes == shape.max_nodes else f"{min_nodes}-{shape.max_nodes}"
    memory = f"{shape.memory_bytes >> 20}M" if shape.memory_bytes else ""
    return {
        "partition": options.partition,
        "constraint": options.constraint,
        "nodes": nodes,
        "ntasks-per-node": "1",
        "cpus-per-task": str(shape.spec.cpus),
        "mem": memory,
        "gres": _gres(shape, options),
    }


def _gres(shape: Shape, options: SlurmPool) -> str:
    if options.gres or not shape.devices:
        return options.gres
    if shape.resource != "GPU":
        raise missing_field(
            f"pools.{shape.pool}.slurm.gres", f"a pool of {shape.kind}", "write it as `scontrol show node` shows it"
        )
    return f"gpu:{shape.devices}"


def _nodes(number: int, shape: Shape, pools: int, folders: dict[str, str]) -> str:
    """Return the command that starts the watchdogs of one pool's nodes."""
    labels = ",".join(f"{key}={value}" for key, value in shape.labels().items())
    variables_by_name = shape.variables(folders[shape.pool], other_storages(folders, shape.pool)) | {
        "POLYFLEET_LABELS": labels
    }
    counts = shape.resources()
    other_counts = {name: count for name, count in counts.items() if name not in ("CPU", "GPU")}
    custom = "{" + ", ".join(f'"{name}": {count}' for name, count in other_counts.items()) + "}"
    python = shape.spec.environment.interpreter
    ray = [python, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={counts['CPU']}",
           f"--num-gpus={counts.get('GPU', 0)}", f"--resources={custom}"]  # fmt: skip
    component = f" --het-group={number}" if pools > 1 else ""
    variables = " \\\n  ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(variables_by_name.items()))
    return f"""
# pool {shape.pool}, environment {environment_name(shape.spec)}
srun{component} --ntasks-per-node=1 --cpus-per-task={shape.spec.cpus} --overlap --kill-on-bad-exit=0 env \\
  {variables} \\
  bash -c "$watchdog" watchdog {shlex.join(ray)} --address="$POLYFLEET_RAY_ADDRESS" &
nodes+=($!)"""
