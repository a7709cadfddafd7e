"""Communicators of serving engines (docs/serving.md).

collectives.py         what an engine's tensor, pipeline and expert parallelism asks for
vllm_plugin.py         vLLM's plug-in: UNISONO_VLLM=1 puts the communicator into its CPU workers
vllm_communicator.py   vLLM's CpuCommunicator over unisono
"""
