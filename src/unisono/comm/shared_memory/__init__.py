"""Ranks of one machine over the engine.

communicator           the implementation
exceptions, failures   from a status, and from a group's end, to the exception that is raised
error_texts,           the texts of those exceptions: of calls, and of messages
  message_error_texts
records                the last thousand calls of every rank, read from outside
record_follower        each of them once, as they come
segment_listeners      who is told of each new group's segment
ledger                 records of a group whose calls another library carries out
"""
