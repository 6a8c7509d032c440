"""Data-parallel training: run by `torchrun --nproc-per-node 2 examples/data_parallel.py`."""

from __future__ import annotations

import os

import torch
import transformers
from arguments import parser, run
from text import rows_of_tokens
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from rockmate import RockmateModule


def main() -> None:
    """Trains one replica a process; the first says what was planned."""
    options = parser(__doc__).parse_args()
    has_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if has_gpu else "gloo")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if has_gpu else torch.device("cpu")
    torch.manual_seed(0)
    tokenizer = None
    if options.model:
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    else:
        sizes = {
            "vocab_size": 256,
            "n_positions": options.length,
            "n_layer": 2,
            "n_embd": 64,
            "n_head": 4,
        }
        config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
        model = transformers.GPT2LMHeadModel(config)
    module = RockmateModule(
        model.to(device).train(), budget=options.budget
    )  # inside DistributedDataParallel, not around it
    parallel = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    rows = rows_of_tokens(
        options.length, options.steps * options.batch_size * num_ranks, tokenizer
    ).to(device)
    for step, batch in enumerate(rows.split(options.batch_size)[rank::num_ranks]):
        loss = parallel(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(mean := loss.detach() / num_ranks)
        if rank == 0:
            print(f"step {step}: loss {mean.item():.3f}", flush=True)
    if rank == 0:
        print(module.plan.summary(), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    run(main)
