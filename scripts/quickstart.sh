#!/usr/bin/env bash
# Fine-tunes the bundled stories260K on the bundled Shakespeare text, with its FP32 optimizer state
# streaming through io_uring from a store on disk, and shows the command line that does it.
# What an earlier run left in build/quickstart/ is removed first.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=build/quickstart
command=(build/spillway train
    --model models/stories260k
    --data data/tinyshakespeare/train.bin
    --val data/tinyshakespeare/val.bin
    --out "$folder/model"
    --optimizer nvme
    --steps 200 --seq-len 128 --micro-batch 8
    --lr 1e-3 --seed 1
    --log "$folder/log.jsonl")

rm -rf "$folder"
mkdir -p "$folder"
echo "quickstart: running"
printf '    %s' "${command[*]:0:2}"
for word in "${command[@]:2}"; do
    case $word in
        --*) printf ' \\\n        %s' "$word" ;;
        *) printf ' %s' "$word" ;;
    esac
done
printf '\n\n'
exec "${command[@]}"
