"""The implementation over any process group of torch (gloo, nccl, mpi).

communicator, messages       collectives; point to point
group                        what all calls go through: arguments, executor, end
executors                    who carries calls out: a thread per group, or a stream
wire                         the few things that are asked of a process group
call_check                   comparing what the ranks are about to do
arithmetic, rows             how numbers travel so that any backend reduces them right
faults                       how such a group ends: one cause for all members
process_groups               groups that their members alone make
store, master_store          torch Stores: in a nameless file, and at MASTER_ADDR
compile                      what keeps torch.compile out
"""
