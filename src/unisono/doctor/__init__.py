"""`unisono doctor`: checks this machine and every primitive on it (docs/doctor.md).

command.py            the command; diagnosis.py: the checks, how they are printed, and the self-test
                      on new ranks, one backend after the other
software.py           installed software, and GPUs
machine.py            kernel, memory, limits, cores, network; the class Finding
known_variables.py    environment variables: their meaning, and invalid ones
self_test.py          unisono.self_test: every primitive on an existing group
saved_reports.py      reports of the watch that ranks have saved, in a terminal and as a page
topology.py           this machine as a topology, for `unisono plan` and `unisono layout`
"""
