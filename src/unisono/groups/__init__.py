"""The groups of a program that is parallel in several ways at once (docs/groups.md).

manager.py      ProcessGroupManager: every rank's groups along tp, cp, pp, dp, ep; the default one
parents.py      AxisGroup: a rank's group along an axis; what its ranks are taken from
"""
