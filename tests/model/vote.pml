/* The vote on a weight update: src/unisono/training/weights/protocol.py, UpdateProtocol.decide and
 * _settle; Communicator.decide, which is un_group_decide (csrc/base/group.c) on one host and
 * Links.decide over several.
 *
 * Every rank tells its vote and hears all (exchange); proposes what it has seen (decide); the first
 * proposal counts; and who has committed meets the others once more (exchange). Any rank may fail to
 * vote yes, and may die at any step. A death ends the group, which a rank hears of at any moment
 * later, in the exchange or after it: two ranks may leave one exchange differently.
 */
#ifndef RANKS
#define RANKS 3
#endif
#define KEEP 1
#define COMMIT 2

byte here[2];            /* how many have come to each exchange */
bool votes_no = false;   /* somebody does */
bool ended = false;      /* the group: whoever looks may find out */
byte decision = 0;       /* the word of the serial */
byte deaths = 0;
byte served[RANKS];      /* what each rank decided; 0: nothing yet */
byte over = 0;           /* ranks that have returned, raised or died */

#ifdef QUIET
#define DIES skip
#else
#define DIES if :: deaths < MOST_DEATHS -> deaths++; ended = true; goto gone :: else fi
#endif
#define MAY_DIE if :: DIES :: skip fi
#ifndef MOST_DEATHS
#define MOST_DEATHS 2
#endif

/* All have come: then everybody hears of it, unless the end of the group is noticed first. */
inline exchange(round, failed) {
    printf("MSC: %d exchange\n", _pid);
    here[round]++;
    if
    :: here[round] == RANKS -> failed = false
    :: ended -> failed = true
    fi
}

inline settle(proposal) {
    atomic {
        if
        :: decision == 0 -> decision = proposal
        :: else
        fi;
        served[_pid] = decision;
        printf("MSC: %d decide\n", _pid)
    }
}

active [RANKS] proctype rank() {
    bool failed, no;
    MAY_DIE;
    if
#ifndef QUIET
    :: votes_no = true; no = true
#endif
    :: skip
    fi;
    MAY_DIE;
    exchange(0, failed);
    MAY_DIE;
    if
    :: failed -> settle(KEEP); ended = true; goto gone /* it raises, and aborts the group */
    :: !failed && votes_no -> settle(KEEP); goto gone /* all raise; the group goes on */
    :: !failed && !votes_no -> settle(COMMIT)
    fi;
    MAY_DIE;
    if
    :: served[_pid] == KEEP -> skip
    :: served[_pid] == COMMIT -> printf("MSC: %d commit\n", _pid)
    fi;
    exchange(1, failed);
    assert(failed || served[_pid] == COMMIT); /* who returns serves the new weights */
gone:
    over++
}

#define apart (served[0] + served[1] + served[2] > 0 && \
    (served[0] == KEEP || served[1] == KEEP || served[2] == KEEP) && \
    (served[0] == COMMIT || served[1] == COMMIT || served[2] == COMMIT))

/* No two decisions for one serial. */
ltl alike { [] !apart }
/* No survivor waits for ever. */
ltl ends { <> (over == RANKS) }
