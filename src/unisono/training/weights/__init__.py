"""New weights from trainers to inference engines (docs/weights.md).

endpoints.py     WeightSender, WeightReceiver and weight_update: what a program sees
update_group.py  parameter by parameter, as vLLM and OpenRLHF do; meeting.py: how they meet
loading.py       workers with load_weights(pairs), vLLM's among them
protocol.py      the rounds of an update, under both; vote.py: the decision of all ranks
shards.py        what a process holds under each name
description.py   what each rank tells of it, and how far it fits together
plan.py          from what all ranks hold to what travels
transfers.py     how it travels, and whether it arrived as it was sent
reading.py       weights that are shared tensors, read where they lie
gpu_memory.py    a trainer's memory on a GPU, which engines serve
staging.py       where engines receive, and how new weights replace the old ones
"""
