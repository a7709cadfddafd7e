"""Communicators of serving engines (docs/serving.md).

collectives.py         what an engine's tensor, pipeline and expert parallelism asks for
vllm_plugin.py         vLLM's plug-in: what UNISONO_VLLM=1 and UNISONO_REPLACE=gloo do to it
vllm_communicator.py   vLLM's CpuCommunicator over unisono
"""
