"""Ranks of one machine over shared memory.

memory_transport.py      the transport: the engine carries out every call whole
allocation.py            memory that all ranks have mapped, for shared tensors
shared_pages.py          tensors of other libraries, shared where they lie
torch_reductions.py      torch's reductions, by name
exceptions.py            from the status of a call or a message to its exception
failures.py              from the way a group ended to the exception that its ranks raise
error_texts.py           what these say
records.py               what every call left behind
record_reader.py         reading it from another process
group_parts.py           one host's part of a group over several
segment_listeners.py     who is told of each new segment
ledger.py                records of a group whose calls another library carries out
"""
