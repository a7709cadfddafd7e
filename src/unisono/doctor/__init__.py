"""`unisono doctor`: is this machine fit, and do the primitives work on it (docs/doctor.md)?

command.py            the command; diagnosis.py: what is looked at and printed
software.py           what is installed, and GPUs
machine.py            kernel, memory, limits, cores, network; what a finding is
known_variables.py    environment variables: what they mean, what is wrong with them
self_test.py          unisono.self_test: every primitive on the group at hand
ranks.py              the self-test on new ranks, one backend after the other
host_links.py         the links between hosts, and which one is slow
saved_reports.py      reports of the watch that ranks have saved
incident_page.py      the same as a page
"""
