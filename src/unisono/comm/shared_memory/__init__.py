"""Ranks of one machine over shared memory.

communicator.py          the Communicator
splitting.py             how members of a group make one of their own
engine_calls.py          its part that brings collectives to the engine
messages.py              its part that is point to point
torch_reductions.py      torch's reductions, by name
allocation.py            memory that all ranks have mapped, for shared tensors
shared_pages.py          tensors of other libraries, shared where they lie
dtypes.py                lists of several dtypes as lists of one each
exceptions.py            from the status of a call or a message to its exception
failures.py              from the way a group ended to the exception that its ranks raise
error_texts.py           what these say
records.py               what every call left behind, read from another process
record_follower.py       every record once, as they come
segment_listeners.py     who is told of each new segment
ledger.py                records of a group whose calls another library carries out
"""
