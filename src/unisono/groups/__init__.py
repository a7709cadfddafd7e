"""The groups of a program that is parallel in several ways at once (docs/groups.md).

manager.py      ProcessGroupManager: every rank's groups along tp, cp, pp, dp, ep; the default one
axis_group.py   AxisGroup: the group that a rank is in along an axis
parents.py      what a manager's ranks are taken from, and how it makes their groups
"""
