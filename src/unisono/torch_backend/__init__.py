"""Our interface as a torch.distributed backend.

autoload, creation      registering the backend; what torch calls to make a group
process_group           the class that torch sees
signatures              the ways in which its methods may be called
work, futures           works as torch knows them, and the Futures that DDP waits for
groups                  torch process groups over a Communicator of ours
flight_recorder         torch's Flight Recorder, where it is asked for
versions                which versions of torch it works with
"""
