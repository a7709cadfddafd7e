"""`unisono doctor`: is this machine fit, and do the primitives work on it (docs/doctor.md)?

command.py         the command; diagnosis.py: what is looked at and printed
findings.py        how a thing stands, and what to do about it
software.py        what is installed; gpus.py: GPUs, and who shares one
machine.py         kernel, memory, limits, cores, network
variables.py       the environment variables: what they mean, how they stand
ranks.py           the self-test on new ranks, one backend after the other
selftest/          unisono.debug_communication: every primitive on the group at hand
saved_reports.py   reports of the watch that ranks have saved
incident_page.py   the same as a page; incident_timeline.py: who waits for whom, on one time axis
"""
