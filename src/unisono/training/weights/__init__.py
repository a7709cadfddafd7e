"""New weights from trainers to inference engines (docs/weights.md).

endpoints.py   WeightSender, WeightReceiver and weight_update: what a program sees
shards.py      what a process holds under each name
description.py what each rank tells of them
plan.py        from what all ranks hold to what travels, or a table of differences
transfers.py   how it travels
reading.py     weights that are shared tensors, read where they lie
aliasing.py    engines whose tensors are the trainer's memory
gpu_memory.py  such memory on a GPU: exported by trainers, opened by engines; gpus.py: for torch
checksum.py    whether it arrived as it was sent
protocol.py    the rounds of an update, and the decision of all ranks
update_group.py   parameter by parameter, as vLLM and OpenRLHF do; meeting.py: how they meet
loading.py     workers with load_weights(pairs), vLLM's among them
staging.py     where engines receive, and how new weights replace the old ones
"""
