"""New weights from trainers to inference engines (docs/weights.md).

endpoints.py     WeightSender, WeightReceiver and weight_update: the public interface
by_parameter.py  parameter by parameter, as vLLM and OpenRLHF do; meeting.py: how they meet
stateless.py     a communicator in the shape of vLLM's PyNcclCommunicator
vllm_engine.py   vLLM's weight transfer engines; vllm_plugin.py: how vLLM finds them
verl_engine.py   verl's checkpoint engine
protocol.py      the rounds of an update, for both, and the ranks' decision
shards.py        what a process holds under each name
load_plan.py     which parts of a checkpoint's tensors an engine's loader reads
quantized.py     the trainer's weights in float8 or int8
plan.py          what each rank describes, whether it fits together, and what is sent
transfers.py     how it is sent, and whether it arrived intact
deltas.py        between hosts: only what has changed
gpu_memory.py    a trainer's memory on a GPU, which engines serve
staging.py       where engines receive, and how new weights replace the old ones
"""
