#define rand	pan_rand
#define pthread_equal(a,b)	((a)==(b))
#if defined(HAS_CODE) && defined(VERBOSE)
	#ifdef BFS_PAR
		bfs_printf("Pr: %d Tr: %d\n", II, t->forw);
	#else
		cpu_printf("Pr: %d Tr: %d\n", II, t->forw);
	#endif
#endif
	switch (t->forw) {
	default: Uerror("bad forward move");
	case 0:	/* if without executable clauses */
		continue;
	case 1: /* generic 'goto' or 'skip' */
		IfNotBlocked
		_m = 3; goto P999;
	case 2: /* generic 'else' */
		IfNotBlocked
		if (trpt->o_pm&1) continue;
		_m = 3; goto P999;

		 /* CLAIM only_chosen */
	case 3: // STATE 1 - _spin_nvr.tmp:28 - [(!(((!(group_of[0])||((choice[group_of[0]]&1)&&(opened[group_of[0]]==(choice[group_of[0]]&7))))&&(!(group_of[1])||((choice[group_of[1]]&2)&&(opened[group_of[1]]==(choice[group_of[1]]&7)))))))] (6:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[5][1] = 1;
		if (!( !((( !(((int)now.group_of[0]))||((((int)now.choice[ Index(((int)now.group_of[0]), 6) ])&1)&&(((int)now.opened[ Index(((int)now.group_of[0]), 6) ])==(((int)now.choice[ Index(((int)now.group_of[0]), 6) ])&7))))&&( !(((int)now.group_of[1]))||((((int)now.choice[ Index(((int)now.group_of[1]), 6) ])&2)&&(((int)now.opened[ Index(((int)now.group_of[1]), 6) ])==(((int)now.choice[ Index(((int)now.group_of[1]), 6) ])&7))))))))
			continue;
		/* merge: assert(!(!(((!(group_of[0])||((choice[group_of[0]]&1)&&(opened[group_of[0]]==(choice[group_of[0]]&7))))&&(!(group_of[1])||((choice[group_of[1]]&2)&&(opened[group_of[1]]==(choice[group_of[1]]&7))))))))(0, 2, 6) */
		reached[5][2] = 1;
		spin_assert( !( !((( !(((int)now.group_of[0]))||((((int)now.choice[ Index(((int)now.group_of[0]), 6) ])&1)&&(((int)now.opened[ Index(((int)now.group_of[0]), 6) ])==(((int)now.choice[ Index(((int)now.group_of[0]), 6) ])&7))))&&( !(((int)now.group_of[1]))||((((int)now.choice[ Index(((int)now.group_of[1]), 6) ])&2)&&(((int)now.opened[ Index(((int)now.group_of[1]), 6) ])==(((int)now.choice[ Index(((int)now.group_of[1]), 6) ])&7))))))), " !( !((( !(group_of[0])||((choice[group_of[0]]&1)&&(opened[group_of[0]]==(choice[group_of[0]]&7))))&&( !(group_of[1])||((choice[group_of[1]]&2)&&(opened[group_of[1]]==(choice[group_of[1]]&7)))))))", II, tt, t);
		/* merge: .(goto)(0, 7, 6) */
		reached[5][7] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 4: // STATE 10 - _spin_nvr.tmp:33 - [-end-] (0:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported10 = 0;
			if (verbose && !reported10)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported10 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported10 = 0;
			if (verbose && !reported10)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported10 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[5][10] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* CLAIM silence_is_no_farewell */
	case 5: // STATE 1 - _spin_nvr.tmp:19 - [(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2))))))))] (6:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[4][1] = 1;
		if (!( !( !(((((((((int)now.group_of[0])&&((int)now.group_of[1]))&&(((int)now.group_of[0])!=((int)now.group_of[1])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<1))))||((((((int)now.group_of[0])&&((int)now.group_of[2]))&&(((int)now.group_of[0])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<2)))))||((((((int)now.group_of[1])&&((int)now.group_of[2]))&&(((int)now.group_of[1])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<1))))&& !((((int)now.died)&(1<<2)))))))))
			continue;
		/* merge: assert(!(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2)))))))))(0, 2, 6) */
		reached[4][2] = 1;
		spin_assert( !( !( !(((((((((int)now.group_of[0])&&((int)now.group_of[1]))&&(((int)now.group_of[0])!=((int)now.group_of[1])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<1))))||((((((int)now.group_of[0])&&((int)now.group_of[2]))&&(((int)now.group_of[0])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<2)))))||((((((int)now.group_of[1])&&((int)now.group_of[2]))&&(((int)now.group_of[1])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<1))))&& !((((int)now.died)&(1<<2)))))))), " !( !( !(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&& !((died&(1<<0))))&& !((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&& !((died&(1<<0))))&& !((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&& !((died&(1<<1))))&& !((died&(1<<2))))))))", II, tt, t);
		/* merge: .(goto)(0, 7, 6) */
		reached[4][7] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 6: // STATE 10 - _spin_nvr.tmp:24 - [-end-] (0:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported10 = 0;
			if (verbose && !reported10)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported10 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported10 = 0;
			if (verbose && !reported10)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported10 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[4][10] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* CLAIM one_group */
	case 7: // STATE 1 - _spin_nvr.tmp:10 - [(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2))))))))] (6:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[3][1] = 1;
		if (!( !( !(((((((((int)now.group_of[0])&&((int)now.group_of[1]))&&(((int)now.group_of[0])!=((int)now.group_of[1])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<1))))||((((((int)now.group_of[0])&&((int)now.group_of[2]))&&(((int)now.group_of[0])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<2)))))||((((((int)now.group_of[1])&&((int)now.group_of[2]))&&(((int)now.group_of[1])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<1))))&& !((((int)now.died)&(1<<2)))))))))
			continue;
		/* merge: assert(!(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2)))))))))(0, 2, 6) */
		reached[3][2] = 1;
		spin_assert( !( !( !(((((((((int)now.group_of[0])&&((int)now.group_of[1]))&&(((int)now.group_of[0])!=((int)now.group_of[1])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<1))))||((((((int)now.group_of[0])&&((int)now.group_of[2]))&&(((int)now.group_of[0])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<0))))&& !((((int)now.died)&(1<<2)))))||((((((int)now.group_of[1])&&((int)now.group_of[2]))&&(((int)now.group_of[1])!=((int)now.group_of[2])))&& !((((int)now.died)&(1<<1))))&& !((((int)now.died)&(1<<2)))))))), " !( !( !(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&& !((died&(1<<0))))&& !((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&& !((died&(1<<0))))&& !((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&& !((died&(1<<1))))&& !((died&(1<<2))))))))", II, tt, t);
		/* merge: .(goto)(0, 7, 6) */
		reached[3][7] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 8: // STATE 10 - _spin_nvr.tmp:15 - [-end-] (0:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported10 = 0;
			if (verbose && !reported10)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported10 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported10 = 0;
			if (verbose && !reported10)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported10 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[3][10] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* CLAIM ends */
	case 9: // STATE 1 - _spin_nvr.tmp:4 - [(!((over==3)))] (0:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported1 = 0;
			if (verbose && !reported1)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported1 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[2][1] = 1;
		if (!( !((((int)now.over)==3))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 10: // STATE 6 - _spin_nvr.tmp:6 - [-end-] (0:0:0 - 1)
		
#if defined(VERI) && !defined(NP)
#if NCLAIMS>1
		{	static int reported6 = 0;
			if (verbose && !reported6)
			{	int nn = (int) ((Pclaim *)pptr(0))->_n;
				printf("depth %ld: Claim %s (%d), state %d (line %d)\n",
					depth, procname[spin_c_typ[nn]], nn, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported6 = 1;
				fflush(stdout);
		}	}
#else
		{	static int reported6 = 0;
			if (verbose && !reported6)
			{	printf("depth %d: Claim, state %d (line %d)\n",
					(int) depth, (int) ((Pclaim *)pptr(0))->_p, src_claim[ (int) ((Pclaim *)pptr(0))->_p ]);
				reported6 = 1;
				fflush(stdout);
		}	}
#endif
#endif
		reached[2][6] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* PROC :init: */
	case 11: // STATE 1 - tests/model/shrink.pml:150 - [(run rank(0))] (0:0:0 - 1)
		IfNotBlocked
		reached[1][1] = 1;
		if (!(addproc(II, 1, 0, 0)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 12: // STATE 2 - tests/model/shrink.pml:150 - [(run rank(1))] (0:0:0 - 1)
		IfNotBlocked
		reached[1][2] = 1;
		if (!(addproc(II, 1, 0, 1)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 13: // STATE 3 - tests/model/shrink.pml:150 - [(run rank(2))] (0:0:0 - 1)
		IfNotBlocked
		reached[1][3] = 1;
		if (!(addproc(II, 1, 0, 2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 14: // STATE 5 - tests/model/shrink.pml:151 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[1][5] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */

		 /* PROC rank */
	case 15: // STATE 1 - tests/model/shrink.pml:74 - [printf('MSC: %d says %d\\n',me,attempt)] (0:0:0 - 1)
		IfNotBlocked
		reached[0][1] = 1;
		Printf("MSC: %d says %d\n", ((int)((P0 *)_this)->me), ((int)((P0 *)_this)->attempt));
		_m = 3; goto P999; /* 0 */
	case 16: // STATE 2 - tests/model/shrink.pml:75 - [said[((board*3)+me)] = attempt] (0:0:1 - 1)
		IfNotBlocked
		reached[0][2] = 1;
		(trpt+1)->bup.oval = ((int)now.said[ Index(((((int)((P0 *)_this)->board)*3)+((int)((P0 *)_this)->me)), 6) ]);
		now.said[ Index(((((P0 *)_this)->board*3)+((P0 *)_this)->me), 6) ] = ((int)((P0 *)_this)->attempt);
#ifdef VAR_RANGES
		logval("said[((rank:board*3)+rank:me)]", ((int)now.said[ Index(((((int)((P0 *)_this)->board)*3)+((int)((P0 *)_this)->me)), 6) ]));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 17: // STATE 3 - tests/model/shrink.pml:76 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][3] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 18: // STATE 4 - tests/model/shrink.pml:76 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][4] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 19: // STATE 5 - tests/model/shrink.pml:76 - [died = (died|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][5] = 1;
		(trpt+1)->bup.oval = ((int)now.died);
		now.died = (((int)now.died)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("died", ((int)now.died));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 20: // STATE 7 - tests/model/shrink.pml:76 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][7] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 21: // STATE 8 - tests/model/shrink.pml:76 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][8] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 22: // STATE 9 - tests/model/shrink.pml:76 - [stopped = (stopped|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][9] = 1;
		(trpt+1)->bup.oval = ((int)now.stopped);
		now.stopped = (((int)now.stopped)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("stopped", ((int)now.stopped));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 23: // STATE 14 - tests/model/shrink.pml:79 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][14] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 24: // STATE 15 - tests/model/shrink.pml:79 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][15] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 25: // STATE 17 - tests/model/shrink.pml:80 - [(choice[((board*(2+1))+attempt)])] (0:0:0 - 1)
		IfNotBlocked
		reached[0][17] = 1;
		if (!(((int)now.choice[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])))
			continue;
		_m = 3; goto P999; /* 0 */
	case 26: // STATE 18 - tests/model/shrink.pml:81 - [(!(choice[((board*(2+1))+attempt)]))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][18] = 1;
		if (!( !(((int)now.choice[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 27: // STATE 19 - tests/model/shrink.pml:51 - [present = 0] (0:37:3 - 1)
		IfNotBlocked
		reached[0][19] = 1;
		(trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((int)((P0 *)_this)->present);
		((P0 *)_this)->present = 0;
#ifdef VAR_RANGES
		logval("rank:present", ((int)((P0 *)_this)->present));
#endif
		;
		/* merge: silent = 0(37, 20, 37) */
		reached[0][20] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P0 *)_this)->silent);
		((P0 *)_this)->silent = 0;
#ifdef VAR_RANGES
		logval("rank:silent", ((int)((P0 *)_this)->silent));
#endif
		;
		/* merge: i = 0(37, 21, 37) */
		reached[0][21] = 1;
		(trpt+1)->bup.ovals[2] = ((int)((P0 *)_this)->i);
		((P0 *)_this)->i = 0;
#ifdef VAR_RANGES
		logval("rank:i", ((int)((P0 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 38, 37) */
		reached[0][38] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 28: // STATE 22 - tests/model/shrink.pml:53 - [((i<3))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][22] = 1;
		if (!((((int)((P0 *)_this)->i)<3)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 29: // STATE 23 - tests/model/shrink.pml:56 - [(((said[((board*3)+i)]==9)||((i!=me)&&(died&(1<<i)))))] (37:0:1 - 1)
		IfNotBlocked
		reached[0][23] = 1;
		if (!(((((int)now.said[ Index(((((int)((P0 *)_this)->board)*3)+((int)((P0 *)_this)->i)), 6) ])==9)||((((int)((P0 *)_this)->i)!=((int)((P0 *)_this)->me))&&(((int)now.died)&(1<<((int)((P0 *)_this)->i)))))))
			continue;
		/* merge: .(goto)(37, 32, 37) */
		reached[0][32] = 1;
		;
		/* merge: i = (i+1)(37, 33, 37) */
		reached[0][33] = 1;
		(trpt+1)->bup.oval = ((int)((P0 *)_this)->i);
		((P0 *)_this)->i = (((int)((P0 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("rank:i", ((int)((P0 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 38, 37) */
		reached[0][38] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 30: // STATE 32 - tests/model/shrink.pml:63 - [.(goto)] (0:37:1 - 4)
		IfNotBlocked
		reached[0][32] = 1;
		;
		/* merge: i = (i+1)(37, 33, 37) */
		reached[0][33] = 1;
		(trpt+1)->bup.oval = ((int)((P0 *)_this)->i);
		((P0 *)_this)->i = (((int)((P0 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("rank:i", ((int)((P0 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 38, 37) */
		reached[0][38] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 31: // STATE 25 - tests/model/shrink.pml:59 - [((said[((board*3)+i)]>=attempt))] (37:0:2 - 1)
		IfNotBlocked
		reached[0][25] = 1;
		if (!((((int)now.said[ Index(((((int)((P0 *)_this)->board)*3)+((int)((P0 *)_this)->i)), 6) ])>=((int)((P0 *)_this)->attempt))))
			continue;
		/* merge: present = (present|(1<<i))(37, 26, 37) */
		reached[0][26] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)((P0 *)_this)->present);
		((P0 *)_this)->present = (((int)((P0 *)_this)->present)|(1<<((int)((P0 *)_this)->i)));
#ifdef VAR_RANGES
		logval("rank:present", ((int)((P0 *)_this)->present));
#endif
		;
		/* merge: .(goto)(37, 30, 37) */
		reached[0][30] = 1;
		;
		/* merge: .(goto)(37, 32, 37) */
		reached[0][32] = 1;
		;
		/* merge: i = (i+1)(37, 33, 37) */
		reached[0][33] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P0 *)_this)->i);
		((P0 *)_this)->i = (((int)((P0 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("rank:i", ((int)((P0 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 38, 37) */
		reached[0][38] = 1;
		;
		_m = 3; goto P999; /* 5 */
	case 32: // STATE 28 - tests/model/shrink.pml:60 - [silent = (silent|(1<<i))] (0:37:2 - 1)
		IfNotBlocked
		reached[0][28] = 1;
		(trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((int)((P0 *)_this)->silent);
		((P0 *)_this)->silent = (((int)((P0 *)_this)->silent)|(1<<((int)((P0 *)_this)->i)));
#ifdef VAR_RANGES
		logval("rank:silent", ((int)((P0 *)_this)->silent));
#endif
		;
		/* merge: .(goto)(37, 30, 37) */
		reached[0][30] = 1;
		;
		/* merge: .(goto)(37, 32, 37) */
		reached[0][32] = 1;
		;
		/* merge: i = (i+1)(37, 33, 37) */
		reached[0][33] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P0 *)_this)->i);
		((P0 *)_this)->i = (((int)((P0 *)_this)->i)+1);
#ifdef VAR_RANGES
		logval("rank:i", ((int)((P0 *)_this)->i));
#endif
		;
		/* merge: .(goto)(0, 38, 37) */
		reached[0][38] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 33: // STATE 41 - tests/model/shrink.pml:84 - [(((silent==0)||1))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][41] = 1;
		if (!(((((int)((P0 *)_this)->silent)==0)||1)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 34: // STATE 42 - tests/model/shrink.pml:86 - [((silent&&((((present&1)+((present>>1)&1))+((present>>2)&1))<=(((silent&1)+((silent>>1)&1))+((silent>>2)&1)))))] (57:0:3 - 1)
		IfNotBlocked
		reached[0][42] = 1;
		if (!((((int)((P0 *)_this)->silent)&&((((((int)((P0 *)_this)->present)&1)+((((int)((P0 *)_this)->present)>>1)&1))+((((int)((P0 *)_this)->present)>>2)&1))<=(((((int)((P0 *)_this)->silent)&1)+((((int)((P0 *)_this)->silent)>>1)&1))+((((int)((P0 *)_this)->silent)>>2)&1))))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: silent */  (trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((P0 *)_this)->silent;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->silent = 0;
		if (TstOnly) return 1; /* TT */
		/* dead 1: present */  (trpt+1)->bup.ovals[1] = ((P0 *)_this)->present;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->present = 0;
		/* merge: members = (8|16)(0, 43, 57) */
		reached[0][43] = 1;
		(trpt+1)->bup.ovals[2] = ((int)((P0 *)_this)->members);
		((P0 *)_this)->members = (8|16);
#ifdef VAR_RANGES
		logval("rank:members", ((int)((P0 *)_this)->members));
#endif
		;
		/* merge: .(goto)(0, 47, 57) */
		reached[0][47] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 35: // STATE 45 - tests/model/shrink.pml:87 - [members = (8|present)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][45] = 1;
		(trpt+1)->bup.oval = ((int)((P0 *)_this)->members);
		((P0 *)_this)->members = (8|((int)((P0 *)_this)->present));
#ifdef VAR_RANGES
		logval("rank:members", ((int)((P0 *)_this)->members));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 36: // STATE 48 - tests/model/shrink.pml:89 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][48] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 37: // STATE 49 - tests/model/shrink.pml:89 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][49] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 38: // STATE 50 - tests/model/shrink.pml:89 - [died = (died|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][50] = 1;
		(trpt+1)->bup.oval = ((int)now.died);
		now.died = (((int)now.died)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("died", ((int)now.died));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 39: // STATE 52 - tests/model/shrink.pml:89 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][52] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 40: // STATE 53 - tests/model/shrink.pml:89 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][53] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 41: // STATE 54 - tests/model/shrink.pml:89 - [stopped = (stopped|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][54] = 1;
		(trpt+1)->bup.oval = ((int)now.stopped);
		now.stopped = (((int)now.stopped)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("stopped", ((int)now.stopped));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 42: // STATE 59 - tests/model/shrink.pml:90 - [(!(choice[((board*(2+1))+attempt)]))] (71:0:1 - 1)
		IfNotBlocked
		reached[0][59] = 1;
		if (!( !(((int)now.choice[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]))))
			continue;
		/* merge: choice[((board*(2+1))+attempt)] = members(71, 60, 71) */
		reached[0][60] = 1;
		(trpt+1)->bup.oval = ((int)now.choice[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
		now.choice[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = ((int)((P0 *)_this)->members);
#ifdef VAR_RANGES
		logval("choice[((rank:board*(2+1))+rank:attempt)]", ((int)now.choice[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]));
#endif
		;
		/* merge: .(goto)(71, 63, 71) */
		reached[0][63] = 1;
		;
		/* merge: .(goto)(0, 68, 71) */
		reached[0][68] = 1;
		;
		/* merge: .(goto)(0, 70, 71) */
		reached[0][70] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 43: // STATE 63 - tests/model/shrink.pml:90 - [.(goto)] (0:71:0 - 2)
		IfNotBlocked
		reached[0][63] = 1;
		;
		/* merge: .(goto)(0, 68, 71) */
		reached[0][68] = 1;
		;
		/* merge: .(goto)(0, 70, 71) */
		reached[0][70] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 44: // STATE 65 - tests/model/shrink.pml:91 - [((silent&&!(1)))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][65] = 1;
		if (!((((int)((P0 *)_this)->silent)&& !(1))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: silent */  (trpt+1)->bup.oval = ((P0 *)_this)->silent;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->silent = 0;
		_m = 3; goto P999; /* 0 */
	case 45: // STATE 71 - tests/model/shrink.pml:94 - [members = choice[((board*(2+1))+attempt)]] (0:0:1 - 4)
		IfNotBlocked
		reached[0][71] = 1;
		(trpt+1)->bup.oval = ((int)((P0 *)_this)->members);
		((P0 *)_this)->members = ((int)now.choice[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
#ifdef VAR_RANGES
		logval("rank:members", ((int)((P0 *)_this)->members));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 46: // STATE 72 - tests/model/shrink.pml:95 - [((members&16))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][72] = 1;
		if (!((((int)((P0 *)_this)->members)&16)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: members */  (trpt+1)->bup.oval = ((P0 *)_this)->members;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->members = 0;
		_m = 3; goto P999; /* 0 */
	case 47: // STATE 73 - tests/model/shrink.pml:95 - [refused = (refused|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][73] = 1;
		(trpt+1)->bup.oval = ((int)now.refused);
		now.refused = (((int)now.refused)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("refused", ((int)now.refused));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 48: // STATE 78 - tests/model/shrink.pml:96 - [members = (members&7)] (0:102:1 - 2)
		IfNotBlocked
		reached[0][78] = 1;
		(trpt+1)->bup.oval = ((int)((P0 *)_this)->members);
		((P0 *)_this)->members = (((int)((P0 *)_this)->members)&7);
#ifdef VAR_RANGES
		logval("rank:members", ((int)((P0 *)_this)->members));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 49: // STATE 79 - tests/model/shrink.pml:98 - [(!((members&(1<<me))))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][79] = 1;
		if (!( !((((int)((P0 *)_this)->members)&(1<<((int)((P0 *)_this)->me))))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 50: // STATE 80 - tests/model/shrink.pml:100 - [(outcome[((board*(2+1))+attempt)])] (0:0:0 - 1)
		IfNotBlocked
		reached[0][80] = 1;
		if (!(((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])))
			continue;
		_m = 3; goto P999; /* 0 */
	case 51: // STATE 81 - tests/model/shrink.pml:101 - [((((members&died)==members)||1))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][81] = 1;
		if (!((((((int)((P0 *)_this)->members)&((int)now.died))==((int)((P0 *)_this)->members))||1)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: members */  (trpt+1)->bup.oval = ((P0 *)_this)->members;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->members = 0;
		_m = 3; goto P999; /* 0 */
	case 52: // STATE 82 - tests/model/shrink.pml:46 - [((outcome[((board*(2+1))+attempt)]==0))] (99:0:1 - 1)
		IfNotBlocked
		reached[0][82] = 1;
		if (!((((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==0)))
			continue;
		/* merge: outcome[((board*(2+1))+attempt)] = 2(99, 83, 99) */
		reached[0][83] = 1;
		(trpt+1)->bup.oval = ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = 2;
#ifdef VAR_RANGES
		logval("outcome[((rank:board*(2+1))+rank:attempt)]", ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]));
#endif
		;
		/* merge: .(goto)(99, 86, 99) */
		reached[0][86] = 1;
		;
		/* merge: .(goto)(0, 93, 99) */
		reached[0][93] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 53: // STATE 86 - tests/model/shrink.pml:46 - [.(goto)] (0:99:0 - 2)
		IfNotBlocked
		reached[0][86] = 1;
		;
		/* merge: .(goto)(0, 93, 99) */
		reached[0][93] = 1;
		;
		_m = 3; goto P999; /* 1 */
	case 54: // STATE 89 - tests/model/shrink.pml:102 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][89] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 55: // STATE 90 - tests/model/shrink.pml:102 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][90] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 56: // STATE 94 - tests/model/shrink.pml:105 - [((outcome[((board*(2+1))+attempt)]==1))] (0:0:2 - 1)
		IfNotBlocked
		reached[0][94] = 1;
		if (!((((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==1)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: board */  (trpt+1)->bup.ovals = grab_ints(2);
		(trpt+1)->bup.ovals[0] = ((P0 *)_this)->board;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->board = 0;
		if (TstOnly) return 1; /* TT */
		/* dead 1: attempt */  (trpt+1)->bup.ovals[1] = ((P0 *)_this)->attempt;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->attempt = 0;
		_m = 3; goto P999; /* 0 */
	case 57: // STATE 95 - tests/model/shrink.pml:105 - [refused = (refused|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][95] = 1;
		(trpt+1)->bup.oval = ((int)now.refused);
		now.refused = (((int)now.refused)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("refused", ((int)now.refused));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 58: // STATE 104 - tests/model/shrink.pml:110 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][104] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 59: // STATE 105 - tests/model/shrink.pml:110 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][105] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 60: // STATE 106 - tests/model/shrink.pml:110 - [died = (died|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][106] = 1;
		(trpt+1)->bup.oval = ((int)now.died);
		now.died = (((int)now.died)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("died", ((int)now.died));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 61: // STATE 108 - tests/model/shrink.pml:110 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][108] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 62: // STATE 109 - tests/model/shrink.pml:110 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][109] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 63: // STATE 110 - tests/model/shrink.pml:110 - [stopped = (stopped|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][110] = 1;
		(trpt+1)->bup.oval = ((int)now.stopped);
		now.stopped = (((int)now.stopped)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("stopped", ((int)now.stopped));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 64: // STATE 115 - tests/model/shrink.pml:111 - [opened[((board*(2+1))+attempt)] = (opened[((board*(2+1))+attempt)]|(1<<me))] (0:0:1 - 2)
		IfNotBlocked
		reached[0][115] = 1;
		(trpt+1)->bup.oval = ((int)now.opened[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
		now.opened[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = (((int)now.opened[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("opened[((rank:board*(2+1))+rank:attempt)]", ((int)now.opened[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 65: // STATE 116 - tests/model/shrink.pml:112 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][116] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 66: // STATE 117 - tests/model/shrink.pml:112 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][117] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 67: // STATE 118 - tests/model/shrink.pml:112 - [died = (died|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][118] = 1;
		(trpt+1)->bup.oval = ((int)now.died);
		now.died = (((int)now.died)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("died", ((int)now.died));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 68: // STATE 120 - tests/model/shrink.pml:112 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][120] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 69: // STATE 121 - tests/model/shrink.pml:112 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][121] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 70: // STATE 122 - tests/model/shrink.pml:112 - [stopped = (stopped|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][122] = 1;
		(trpt+1)->bup.oval = ((int)now.stopped);
		now.stopped = (((int)now.stopped)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("stopped", ((int)now.stopped));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 71: // STATE 127 - tests/model/shrink.pml:114 - [(!((members&((1<<me)-1))))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][127] = 1;
		if (!( !((((int)((P0 *)_this)->members)&((1<<((int)((P0 *)_this)->me))-1)))))
			continue;
		_m = 3; goto P999; /* 0 */
	case 72: // STATE 128 - tests/model/shrink.pml:116 - [((opened[((board*(2+1))+attempt)]==members))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][128] = 1;
		if (!((((int)now.opened[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==((int)((P0 *)_this)->members))))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: members */  (trpt+1)->bup.oval = ((P0 *)_this)->members;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->members = 0;
		_m = 3; goto P999; /* 0 */
	case 73: // STATE 129 - tests/model/shrink.pml:46 - [((outcome[((board*(2+1))+attempt)]==0))] (184:0:1 - 1)
		IfNotBlocked
		reached[0][129] = 1;
		if (!((((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==0)))
			continue;
		/* merge: outcome[((board*(2+1))+attempt)] = 1(184, 130, 184) */
		reached[0][130] = 1;
		(trpt+1)->bup.oval = ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = 1;
#ifdef VAR_RANGES
		logval("outcome[((rank:board*(2+1))+rank:attempt)]", ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]));
#endif
		;
		/* merge: .(goto)(184, 133, 184) */
		reached[0][133] = 1;
		;
		/* merge: .(goto)(0, 149, 184) */
		reached[0][149] = 1;
		;
		/* merge: .(goto)(0, 167, 184) */
		reached[0][167] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 74: // STATE 133 - tests/model/shrink.pml:46 - [.(goto)] (0:184:0 - 2)
		IfNotBlocked
		reached[0][133] = 1;
		;
		/* merge: .(goto)(0, 149, 184) */
		reached[0][149] = 1;
		;
		/* merge: .(goto)(0, 167, 184) */
		reached[0][167] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 75: // STATE 136 - tests/model/shrink.pml:117 - [((((members&died)||outcome[((board*(2+1))+attempt)])||1))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][136] = 1;
		if (!((((((int)((P0 *)_this)->members)&((int)now.died))||((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]))||1)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: members */  (trpt+1)->bup.oval = ((P0 *)_this)->members;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->members = 0;
		_m = 3; goto P999; /* 0 */
	case 76: // STATE 137 - tests/model/shrink.pml:46 - [((outcome[((board*(2+1))+attempt)]==0))] (184:0:1 - 1)
		IfNotBlocked
		reached[0][137] = 1;
		if (!((((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==0)))
			continue;
		/* merge: outcome[((board*(2+1))+attempt)] = 2(184, 138, 184) */
		reached[0][138] = 1;
		(trpt+1)->bup.oval = ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = 2;
#ifdef VAR_RANGES
		logval("outcome[((rank:board*(2+1))+rank:attempt)]", ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]));
#endif
		;
		/* merge: .(goto)(184, 141, 184) */
		reached[0][141] = 1;
		;
		/* merge: .(goto)(0, 149, 184) */
		reached[0][149] = 1;
		;
		/* merge: .(goto)(0, 167, 184) */
		reached[0][167] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 77: // STATE 141 - tests/model/shrink.pml:46 - [.(goto)] (0:184:0 - 2)
		IfNotBlocked
		reached[0][141] = 1;
		;
		/* merge: .(goto)(0, 149, 184) */
		reached[0][149] = 1;
		;
		/* merge: .(goto)(0, 167, 184) */
		reached[0][167] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 78: // STATE 144 - tests/model/shrink.pml:118 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][144] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 79: // STATE 145 - tests/model/shrink.pml:118 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][145] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 80: // STATE 146 - tests/model/shrink.pml:118 - [refused = (refused|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][146] = 1;
		(trpt+1)->bup.oval = ((int)now.refused);
		now.refused = (((int)now.refused)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("refused", ((int)now.refused));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 81: // STATE 151 - tests/model/shrink.pml:122 - [(outcome[((board*(2+1))+attempt)])] (0:0:0 - 1)
		IfNotBlocked
		reached[0][151] = 1;
		if (!(((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])))
			continue;
		_m = 3; goto P999; /* 0 */
	case 82: // STATE 152 - tests/model/shrink.pml:123 - [(((members&died)||1))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][152] = 1;
		if (!(((((int)((P0 *)_this)->members)&((int)now.died))||1)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: members */  (trpt+1)->bup.oval = ((P0 *)_this)->members;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->members = 0;
		_m = 3; goto P999; /* 0 */
	case 83: // STATE 153 - tests/model/shrink.pml:46 - [((outcome[((board*(2+1))+attempt)]==0))] (184:0:1 - 1)
		IfNotBlocked
		reached[0][153] = 1;
		if (!((((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==0)))
			continue;
		/* merge: outcome[((board*(2+1))+attempt)] = 2(184, 154, 184) */
		reached[0][154] = 1;
		(trpt+1)->bup.oval = ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]);
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = 2;
#ifdef VAR_RANGES
		logval("outcome[((rank:board*(2+1))+rank:attempt)]", ((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ]));
#endif
		;
		/* merge: .(goto)(184, 157, 184) */
		reached[0][157] = 1;
		;
		/* merge: .(goto)(0, 165, 184) */
		reached[0][165] = 1;
		;
		/* merge: .(goto)(0, 167, 184) */
		reached[0][167] = 1;
		;
		_m = 3; goto P999; /* 4 */
	case 84: // STATE 157 - tests/model/shrink.pml:46 - [.(goto)] (0:184:0 - 2)
		IfNotBlocked
		reached[0][157] = 1;
		;
		/* merge: .(goto)(0, 165, 184) */
		reached[0][165] = 1;
		;
		/* merge: .(goto)(0, 167, 184) */
		reached[0][167] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 85: // STATE 160 - tests/model/shrink.pml:124 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][160] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 86: // STATE 161 - tests/model/shrink.pml:124 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][161] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 87: // STATE 162 - tests/model/shrink.pml:124 - [refused = (refused|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][162] = 1;
		(trpt+1)->bup.oval = ((int)now.refused);
		now.refused = (((int)now.refused)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("refused", ((int)now.refused));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 88: // STATE 168 - tests/model/shrink.pml:128 - [((outcome[((board*(2+1))+attempt)]==1))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][168] = 1;
		if (!((((int)now.outcome[ Index(((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt)), 6) ])==1)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 89: // STATE 169 - tests/model/shrink.pml:129 - [group_of[me] = ((board*(2+1))+attempt)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][169] = 1;
		(trpt+1)->bup.oval = ((int)now.group_of[ Index(((int)((P0 *)_this)->me), 3) ]);
		now.group_of[ Index(((P0 *)_this)->me, 3) ] = ((((int)((P0 *)_this)->board)*(2+1))+((int)((P0 *)_this)->attempt));
#ifdef VAR_RANGES
		logval("group_of[rank:me]", ((int)now.group_of[ Index(((int)((P0 *)_this)->me), 3) ]));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 90: // STATE 170 - tests/model/shrink.pml:130 - [printf('MSC: %d goes on\\n',me)] (0:0:0 - 1)
		IfNotBlocked
		reached[0][170] = 1;
		Printf("MSC: %d goes on\n", ((int)((P0 *)_this)->me));
		_m = 3; goto P999; /* 0 */
	case 91: // STATE 171 - tests/model/shrink.pml:131 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][171] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 92: // STATE 172 - tests/model/shrink.pml:131 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][172] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 93: // STATE 173 - tests/model/shrink.pml:131 - [died = (died|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][173] = 1;
		(trpt+1)->bup.oval = ((int)now.died);
		now.died = (((int)now.died)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("died", ((int)now.died));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 94: // STATE 175 - tests/model/shrink.pml:131 - [((faults<2))] (0:0:0 - 1)
		IfNotBlocked
		reached[0][175] = 1;
		if (!((((int)now.faults)<2)))
			continue;
		_m = 3; goto P999; /* 0 */
	case 95: // STATE 176 - tests/model/shrink.pml:131 - [faults = (faults+1)] (0:0:1 - 1)
		IfNotBlocked
		reached[0][176] = 1;
		(trpt+1)->bup.oval = ((int)now.faults);
		now.faults = (((int)now.faults)+1);
#ifdef VAR_RANGES
		logval("faults", ((int)now.faults));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 96: // STATE 177 - tests/model/shrink.pml:131 - [stopped = (stopped|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][177] = 1;
		(trpt+1)->bup.oval = ((int)now.stopped);
		now.stopped = (((int)now.stopped)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("stopped", ((int)now.stopped));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 97: // STATE 186 - tests/model/shrink.pml:137 - [((attempt<2))] (1:0:1 - 1)
		IfNotBlocked
		reached[0][186] = 1;
		if (!((((int)((P0 *)_this)->attempt)<2)))
			continue;
		/* merge: attempt = (attempt+1)(0, 187, 1) */
		reached[0][187] = 1;
		(trpt+1)->bup.oval = ((int)((P0 *)_this)->attempt);
		((P0 *)_this)->attempt = (((int)((P0 *)_this)->attempt)+1);
#ifdef VAR_RANGES
		logval("rank:attempt", ((int)((P0 *)_this)->attempt));
#endif
		;
		/* merge: goto come(0, 188, 1) */
		reached[0][188] = 1;
		;
		_m = 3; goto P999; /* 2 */
	case 98: // STATE 190 - tests/model/shrink.pml:138 - [said[((board*3)+me)] = 9] (0:0:1 - 1)
		IfNotBlocked
		reached[0][190] = 1;
		(trpt+1)->bup.oval = ((int)now.said[ Index(((((int)((P0 *)_this)->board)*3)+((int)((P0 *)_this)->me)), 6) ]);
		now.said[ Index(((((P0 *)_this)->board*3)+((P0 *)_this)->me), 6) ] = 9;
#ifdef VAR_RANGES
		logval("said[((rank:board*3)+rank:me)]", ((int)now.said[ Index(((((int)((P0 *)_this)->board)*3)+((int)((P0 *)_this)->me)), 6) ]));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 99: // STATE 194 - tests/model/shrink.pml:142 - [((board==0))] (1:0:3 - 1)
		IfNotBlocked
		reached[0][194] = 1;
		if (!((((int)((P0 *)_this)->board)==0)))
			continue;
		if (TstOnly) return 1; /* TT */
		/* dead 1: board */  (trpt+1)->bup.ovals = grab_ints(3);
		(trpt+1)->bup.ovals[0] = ((P0 *)_this)->board;
#ifdef HAS_CODE
		if (!readtrail)
#endif
			((P0 *)_this)->board = 0;
		/* merge: board = 1(1, 195, 1) */
		reached[0][195] = 1;
		(trpt+1)->bup.ovals[1] = ((int)((P0 *)_this)->board);
		((P0 *)_this)->board = 1;
#ifdef VAR_RANGES
		logval("rank:board", ((int)((P0 *)_this)->board));
#endif
		;
		/* merge: attempt = 1(1, 196, 1) */
		reached[0][196] = 1;
		(trpt+1)->bup.ovals[2] = ((int)((P0 *)_this)->attempt);
		((P0 *)_this)->attempt = 1;
#ifdef VAR_RANGES
		logval("rank:attempt", ((int)((P0 *)_this)->attempt));
#endif
		;
		/* merge: goto come(0, 197, 1) */
		reached[0][197] = 1;
		;
		_m = 3; goto P999; /* 3 */
	case 100: // STATE 199 - tests/model/shrink.pml:143 - [refused = (refused|(1<<me))] (0:0:1 - 1)
		IfNotBlocked
		reached[0][199] = 1;
		(trpt+1)->bup.oval = ((int)now.refused);
		now.refused = (((int)now.refused)|(1<<((int)((P0 *)_this)->me)));
#ifdef VAR_RANGES
		logval("refused", ((int)now.refused));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 101: // STATE 202 - tests/model/shrink.pml:146 - [over = (over+1)] (0:0:1 - 35)
		IfNotBlocked
		reached[0][202] = 1;
		(trpt+1)->bup.oval = ((int)now.over);
		now.over = (((int)now.over)+1);
#ifdef VAR_RANGES
		logval("over", ((int)now.over));
#endif
		;
		_m = 3; goto P999; /* 0 */
	case 102: // STATE 203 - tests/model/shrink.pml:147 - [-end-] (0:0:0 - 1)
		IfNotBlocked
		reached[0][203] = 1;
		if (!delproc(1, II)) continue;
		_m = 3; goto P999; /* 0 */
	case  _T5:	/* np_ */
		if (!((!(trpt->o_pm&4) && !(trpt->tau&128))))
			continue;
		/* else fall through */
	case  _T2:	/* true */
		_m = 3; goto P999;
#undef rand
	}

