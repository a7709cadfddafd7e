"""New weights from trainers to inference engines (docs/weights.md).

endpoints.py     WeightSender, WeightReceiver and weight_update: what a program sees
by_parameter.py  parameter by parameter, as vLLM and OpenRLHF do; meeting.py: how they meet
stateless.py     a communicator in the shape of vLLM's PyNcclCommunicator
vllm_engine.py   vLLM's weight transfer engines; vllm_plugin.py: how vLLM finds them
verl_engine.py   verl's checkpoint engine
protocol.py      the rounds of an update, under both, and the decision of all ranks
shards.py        what a process holds under each name
plan.py          what each rank tells of it, how far it fits together, and what travels
transfers.py     how it travels, and whether it arrived as it was sent
deltas.py        between hosts: what has changed, instead of all
gpu_memory.py    a trainer's memory on a GPU, which engines serve
staging.py       where engines receive, and how new weights replace the old ones
"""
