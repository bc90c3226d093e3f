#!/usr/bin/env bash
# Runs the measurements of docs/quality.md again. Written by benchmarks/quality/report.py from benchmarks/results.
#
#   scripts/quality.sh [--list] [TEXT]
#
# Runs the commands that contain TEXT, all by default; --list only prints them. Reports and traces go to build/quality.
# Needs the preset release, built. A command that cannot run here is named and skipped: it
# needs a GPU (KVTIER_CUDA_LIBS names the folders of its libraries), or a trace that is not in the repository.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

list=0
if [[ ${1:-} == --list ]]; then
  list=1
  shift
fi
wanted=${1:-}

mkdir -p build/quality
cd build/quality
for folder in benchmarks data build; do ln -sfn "../../$folder" "$folder"; done

# why_not COMMAND: prints why a command cannot run here, or nothing.
why_not() {
  if [[ $1 == *"--backend cuda"* ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    echo "needs a GPU"
  elif [[ $1 == *" trace-layer2.safetensors"* && ! -e trace-layer2.safetensors ]]; then
    echo "needs the trace build/quality/trace-layer2.safetensors"
  fi
}

mapfile -t commands <<'COMMANDS'
for p in 4 5 6 7 8 9 10 11 12; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n8192.d100 --sequences 4 --selection per_query_head --rule top_k --code sign --estimator soft_collision --value-weighting linear,none,calibrated --sparsity 0,20 --planes-per-table $p --json P$p.json; done
for l in 10 20 40 50 60 70; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n8192.d100 --sequences 4 --selection per_query_head --rule top_k --code sign --estimator soft_collision --value-weighting linear,none,calibrated --sparsity 0,20 --tables $l --json L$l.json; done
for t in .1 .2 .3 .4 .5 .6 .7 .8; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n8192.d100 --sequences 4 --selection per_query_head --rule top_k --code sign --estimator soft_collision --value-weighting linear,none,calibrated --sparsity 0,20 --tau $t --json tau$t.json; done
for b in 64 128 256 512 600 1024; do for q in 0 4 8; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n8192.d100 --sequences 4 --selection per_query_head --rule top_k --code sign --estimator norm_aware --value-weighting logit --sparsity 0,20 --bits $b --query-bits $q --json bits$b-$q.json; done; done
build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --sequences 4 --selection per_query_head --cases n8192.d100 --rule top_k --code sign --estimator soft_collision --value-weighting linear,none,calibrated --sparsity 0,5,10,20,50,100,200 --json ratios-soft.json
for b in 128 256; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --sequences 4 --selection per_query_head --cases n8192.d100 --rule top_k --code sign --estimator norm_aware --bits $b --sparsity 0,5,10,20,50,100,200 --json ratios-$b.json; done
build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --sequences 4 --selection per_query_head --cases n32768.d100 --rule top_k --code sign --estimator soft_collision --value-weighting linear,none --sparsity 20,50,100,200 --json ratios-long-soft.json
for b in 128 256; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --sequences 4 --selection per_query_head --cases n32768.d100 --rule top_k --code sign --estimator norm_aware --bits $b --sparsity 0,20,50,100,200 --json ratios-long-$b.json; done
benchmarks/quality/grid.py --out .
build/release/benchmarks/quality/kvtier-quality-budget --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n32768.d100 --sequences 1 --recall 0.8,0.9,0.95,0.98,0.99 --json 2026-11-23-cpu-budget-n32768.d100.json
build/release/examples/llama/kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n8192.d100 --steps 96 --out n8192.d100-0.safetensors
build/release/examples/llama/kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n8192.d100 --sequence 1 --steps 96 --out n8192.d100-1.safetensors
build/release/benchmarks/quality/kvtier-quality-budget --calibrate n8192.d100-0.safetensors --calibration-name "n8192.d100, sequence 0" --trace n8192.d100-1.safetensors --name "n8192.d100, sequence 1" --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n8192.d100 --sequences 4 --recall 0.8,0.9,0.95,0.98,0.99 --steps 16 --json 2026-11-23-cpu-budget-n8192.d100.json
benchmarks/quality/grid.py --others --out .
build/release/benchmarks/quality/kvtier-quality-answers --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n32768.d100 --sequences 4 --sparsity 50 --selectors dense,exact,norm_aware --plane-seeds 1,2,3,4,5,6,7 --json 2026-11-23-cpu-oracle-n32768.d100.json
build/release/examples/llama/kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n8192.d100 --steps 96 --out n8192.d100.safetensors
build/release/benchmarks/quality/kvtier-quality n8192.d100.safetensors --name n8192.d100 --made-by 'kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n8192.d100 --steps 96 --out n8192.d100.safetensors' --sparsity 5,10,20,33,50,100,200 --steps 32 --json 2026-11-23-cpu-quality-n8192.d100.json
build/release/benchmarks/quality/kvtier-quality data/traces/needle-layer2-cut.safetensors --name needle-layer2-cut --sparsity 5,10,20,33,50,100,200 --sink 128 --window 128 --json 2026-11-23-cpu-quality-needle-layer2-cut.json
build/release/examples/llama/kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n32768.d100 --out n32768.d100.safetensors
build/release/examples/llama/kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n16384.d50 --sequence 1 --out n16384.d50.safetensors
build/release/benchmarks/quality/kvtier-quality-rows trace-layer2.safetensors n32768.d100.safetensors n16384.d50.safetensors --made-by 'kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n32768.d100 --out n32768.d100.safetensors; kvtier-llama record --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n16384.d50 --sequence 1 --out n16384.d50.safetensors' --rule top_k --code sign --sink 128 --window 128 --json 2026-11-23-cpu-rows-needle-llama.json
build/release/benchmarks/quality/kvtier-quality-answers --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n32768.d100 --sequences 4 --sparsity 50 --variants --selectors exact,signs --json 2026-11-23-cpu-variants-n32768.d100.json
build/release/benchmarks/quality/kvtier-quality-answers --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --case n8192.d100 --sequences 4 --sparsity 50 --variants --selectors exact,signs --json 2026-11-23-cpu-variants-n8192.d100.json
for q in 0 4 8; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n32768.d100 --sequences 4 --rule top_k --code sign --estimator norm_aware --bits 128 --selection per_query_head --sparsity 0,50 --query-bits $q --json query_bits$q.json; done
for s in 1 2; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n32768.d100 --sequences 4 --rule top_k --code sign --estimator norm_aware --bits 128 --selection per_query_head --sparsity 0,50 --query-bits 8 --seed $s --json seed$s.json; done
for w in "43.6324 --sink 16 --window 16" "45.8293 --sink 4 --window 64" "46.6117 --sink 64 --window 16" "62.178 --sink 128 --window 128" "50 --value-weighting none"; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n32768.d100 --sequences 4 --rule top_k --code sign --estimator norm_aware --bits 128 --selection per_query_head --json options.json --sparsity 0,$w; done
for s in 50 12.5; do build/release/examples/llama/kvtier-llama eval --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --backend cuda --matmul cuda --cuda-libs DIR --cases n32768.d100 --sequences 4 --rule top_k --code sign --estimator norm_aware --bits 128 --selection per_kv_head --sparsity 0,$s --json per_kv_head$s.json; done
build/release/examples/llama/kvtier-llama eval --backend cuda --matmul cuda --cuda-libs DIR --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --cases n32768.d100 --sequences 4 --estimator norm_aware --selection per_kv_head,per_query_head --rule top_k,priority --code sign,scalar --bits 128,256 --sparsity 0,50,100 --json needle-n32768.json
build/release/examples/llama/kvtier-llama eval --backend cuda --matmul cuda --cuda-libs DIR --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --cases n8192.d100 --sequences 4 --estimator norm_aware --selection per_kv_head,per_query_head --rule top_k,priority --code sign --bits 64,128,256,512 --sparsity 0,5,10,20,33,50,100,200 --json needle-n8192.d100-sign.json
build/release/examples/llama/kvtier-llama eval --backend cuda --matmul cuda --cuda-libs DIR --model data/needle-llama/model --tasks data/needle-llama/tasks/dev.safetensors --cases n8192.d100 --sequences 4 --estimator norm_aware --selection per_kv_head,per_query_head --rule top_k,priority --code scalar --bits 128,256,512 --sparsity 0,5,10,20,33,50,100,200 --json needle-n8192.d100-scalar.json
COMMANDS

found=0
for command in "${commands[@]}"; do
  if [[ $command != *"$wanted"* ]]; then continue; fi
  found=1
  reason=$(why_not "$command")
  echo "== ${reason:+skipped, $reason: }$command"
  if ((list)) || [[ -n $reason ]]; then continue; fi
  bash -euc "${command//--cuda-libs DIR/--cuda-libs ${KVTIER_CUDA_LIBS:-.}}"
done
if ((!found)); then
  echo "quality.sh: expected a text that a command contains, found $wanted" >&2
  exit 2
fi
