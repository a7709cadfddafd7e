/* How a group is made on one host: src/unisono/comm/meeting/leading.py, Leader.make_group, _receive,
 * _admit and _hand_over; membership.py, follow and _await_invitation. new_group and split meet in the
 * same way.
 *
 * Followers say hello. Once all have, rank 0 makes the segment and sends every one an invitation;
 * each opens it and says so; once all have, rank 0 lets every one go. Any process may die (its
 * connections close) or stop (they do not) at any step, and any wait may reach its deadline.
 */
#define FOLLOWERS 2
#define RANKS (FOLLOWERS + 1)
mtype = { hello, invitation, opened, go, failed };

chan up[RANKS] = [3] of { mtype };   /* from a follower to rank 0 */
chan down[RANKS] = [3] of { mtype };
bool closed[RANKS];                  /* a rank has closed its end of the connection: 0, all of them */
bool is_open[RANKS];                 /* it has the segment mapped, and is watched */
bool member[RANKS];                  /* it has returned as a member */
bool lost[RANKS];                    /* it has died, or has closed what it had opened */
bool stopped[RANKS];
byte faults = 0, over = 0;

#ifndef MOST_FAULTS
#define MOST_FAULTS 2
#endif
#ifdef QUIET
#define ANYTHING skip
#define LATE false
#else
#define LATE true
#define ANYTHING if \
    :: faults < MOST_FAULTS -> faults++; goto dead \
    :: faults < MOST_FAULTS -> faults++; stopped[me] = true; goto stop \
    :: skip fi
#endif

proctype leader() {
    byte me = 0, i = 1;
    mtype what;
    do /* _receive */
    :: i < RANKS ->
        if
        :: up[i] ? what -> if :: what == hello -> i++ :: else -> goto raise fi
        :: LATE -> goto raise
        fi
    :: else -> break
    od;
    ANYTHING;
    i = 1;
    do /* _hand_over; whoever has gone is found below */
    :: i < RANKS -> printf("MSC: 0 sends invitation\n"); down[i] ! invitation; i++; ANYTHING
    :: else -> break
    od;
    is_open[0] = true;
    i = 1;
    do /* _admit */
    :: i < RANKS ->
        if
        :: up[i] ? what -> if :: what == opened -> i++ :: else -> goto raise fi
        :: empty(up[i]) && closed[i] -> goto raise
        :: LATE -> goto raise
        fi
    :: else -> break
    od;
    i = 1;
    do
    :: i < RANKS && closed[i] -> goto raise /* it cannot be sent to */
    :: i < RANKS && !closed[i] -> printf("MSC: 0 sends go\n"); down[i] ! go; i++; ANYTHING
    :: i == RANKS -> break
    od;
    member[0] = true;
    goto ends;
raise:
    lost[0] = true; /* what it had opened is closed */
    i = 1;
    do
    :: i < RANKS && nfull(down[i]) -> down[i] ! failed; i++; ANYTHING
    :: i < RANKS && full(down[i]) -> i++
    :: i == RANKS -> break
    od;
    goto ends;
dead:
    lost[0] = true;
ends:
    closed[0] = true;
stop:
    over++
}

proctype follower(byte me) {
    mtype what;
    ANYTHING;
    printf("MSC: %d sends hello\n", me);
    up[me] ! hello;
    ANYTHING;
    if /* _await_invitation */
    :: down[me] ? what -> if :: what == invitation :: else -> goto dead fi
    :: empty(down[me]) && closed[0] -> goto dead
    :: LATE -> goto dead
    fi;
    ANYTHING;
    if
    :: is_open[me] = true
    :: LATE -> up[me] ! failed; goto dead /* no memory, say */
    fi;
    ANYTHING;
    printf("MSC: %d sends opened\n", me);
    up[me] ! opened;
    ANYTHING;
    if
    :: down[me] ? what -> if :: what == go :: else -> goto dead fi
    :: empty(down[me]) && closed[0] -> goto dead
    :: LATE -> goto dead
    fi;
    member[me] = true;
    goto ends;
dead: /* or raised: whatever it had opened is closed */
    lost[me] = true;
ends:
    closed[me] = true;
stop:
    over++
}

init {
    atomic { run leader(); run follower(1); run follower(2) }
}

/* No survivor waits for ever. */
ltl ends { <> (over == RANKS) }
/* Who is a member of a group that others are not in finds out: one of them has been lost, or is stopped
 * with the group open, which is what deadlines are for. No group has fewer members than it should. */
#define some (member[0] || member[1] || member[2])
#define all_open (is_open[0] && is_open[1] && is_open[2])
ltl whole { [] (some -> all_open) }
#define apart (over == RANKS && some && !(member[0] && member[1] && member[2]))
#define known (lost[0] || lost[1] || lost[2] || stopped[0] || stopped[1] || stopped[2])
ltl told { [] (apart -> known) }
