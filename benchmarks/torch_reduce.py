"""Run one rank of an all-reduce with gloo on loopback, for merge.py."""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

rank, ranks, parameters, rounds, port = map(int, sys.argv[1:])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=ranks)
vector = torch.randn(parameters)
took = []
for number in range(-1, rounds):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(vector)
    dist.barrier()
    if number >= 0:
        took.append(time.perf_counter() - start)
    vector /= ranks
if rank == 0:
    print(json.dumps(took))
dist.destroy_process_group()
