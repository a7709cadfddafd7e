"""Ranks of one machine over shared memory.

engine_transport.py      a rank of a group of the engine, which runs every call as a whole
memory_transport.py      the transport of ranks on one host
allocation.py            memory that all ranks map, for shared tensors
shared_pages.py          tensors of other libraries, shared in place
torch_reductions.py      torch's reductions, by name
exceptions.py            from the status of a call or a message to its exception
failures.py              from the way a group ended to the exception that its ranks raise
error_texts.py           the texts of these
records.py               the record of every call
record_reader.py         reading records from another process
group_parts.py           one host's part of a group over several
segment_listeners.py     what is told of each new segment
ledger.py                records of a group whose calls another library runs
"""
