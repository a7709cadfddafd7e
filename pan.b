	switch (t->back) {
	default: Uerror("bad return move");
	case  0: goto R999; /* nothing to undo */

		 /* CLAIM only_chosen */
;
		
	case 3: // STATE 1
		goto R999;

	case 4: // STATE 10
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* CLAIM silence_is_no_farewell */
;
		
	case 5: // STATE 1
		goto R999;

	case 6: // STATE 10
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* CLAIM one_group */
;
		
	case 7: // STATE 1
		goto R999;

	case 8: // STATE 10
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* CLAIM ends */
;
		;
		
	case 10: // STATE 6
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* PROC :init: */

	case 11: // STATE 1
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 12: // STATE 2
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 13: // STATE 3
		;
		;
		delproc(0, now._nr_pr-1);
		;
		goto R999;

	case 14: // STATE 5
		;
		p_restor(II);
		;
		;
		goto R999;

		 /* PROC rank */
;
		;
		
	case 16: // STATE 2
		;
		now.said[ Index(((((P0 *)_this)->board*3)+((P0 *)_this)->me), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 18: // STATE 4
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 19: // STATE 5
		;
		now.died = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 21: // STATE 8
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 22: // STATE 9
		;
		now.stopped = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 24: // STATE 15
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;
;
		;
		;
		;
		
	case 27: // STATE 21
		;
		((P0 *)_this)->i = trpt->bup.ovals[2];
		((P0 *)_this)->silent = trpt->bup.ovals[1];
		((P0 *)_this)->present = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;
;
		;
		
	case 29: // STATE 33
		;
		((P0 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 30: // STATE 33
		;
		((P0 *)_this)->i = trpt->bup.oval;
		;
		goto R999;

	case 31: // STATE 33
		;
		((P0 *)_this)->i = trpt->bup.ovals[1];
		((P0 *)_this)->present = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 32: // STATE 33
		;
		((P0 *)_this)->i = trpt->bup.ovals[1];
		((P0 *)_this)->silent = trpt->bup.ovals[0];
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;
;
		;
		
	case 34: // STATE 43
		;
		((P0 *)_this)->members = trpt->bup.ovals[2];
	/* 1 */	((P0 *)_this)->present = trpt->bup.ovals[1];
	/* 0 */	((P0 *)_this)->silent = trpt->bup.ovals[0];
		;
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;

	case 35: // STATE 45
		;
		((P0 *)_this)->members = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 37: // STATE 49
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 38: // STATE 50
		;
		now.died = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 40: // STATE 53
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 41: // STATE 54
		;
		now.stopped = trpt->bup.oval;
		;
		goto R999;

	case 42: // STATE 60
		;
		now.choice[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 43: // STATE 63
		goto R999;

	case 44: // STATE 65
		;
	/* 0 */	((P0 *)_this)->silent = trpt->bup.oval;
		;
		;
		goto R999;

	case 45: // STATE 71
		;
		((P0 *)_this)->members = trpt->bup.oval;
		;
		goto R999;

	case 46: // STATE 72
		;
	/* 0 */	((P0 *)_this)->members = trpt->bup.oval;
		;
		;
		goto R999;

	case 47: // STATE 73
		;
		now.refused = trpt->bup.oval;
		;
		goto R999;

	case 48: // STATE 78
		;
		((P0 *)_this)->members = trpt->bup.oval;
		;
		goto R999;
;
		;
		;
		;
		
	case 51: // STATE 81
		;
	/* 0 */	((P0 *)_this)->members = trpt->bup.oval;
		;
		;
		goto R999;

	case 52: // STATE 83
		;
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 53: // STATE 86
		goto R999;
;
		;
		
	case 55: // STATE 90
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 56: // STATE 94
		;
	/* 1 */	((P0 *)_this)->attempt = trpt->bup.ovals[1];
	/* 0 */	((P0 *)_this)->board = trpt->bup.ovals[0];
		;
		;
		ungrab_ints(trpt->bup.ovals, 2);
		goto R999;

	case 57: // STATE 95
		;
		now.refused = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 59: // STATE 105
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 60: // STATE 106
		;
		now.died = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 62: // STATE 109
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 63: // STATE 110
		;
		now.stopped = trpt->bup.oval;
		;
		goto R999;

	case 64: // STATE 115
		;
		now.opened[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 66: // STATE 117
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 67: // STATE 118
		;
		now.died = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 69: // STATE 121
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 70: // STATE 122
		;
		now.stopped = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 72: // STATE 128
		;
	/* 0 */	((P0 *)_this)->members = trpt->bup.oval;
		;
		;
		goto R999;

	case 73: // STATE 130
		;
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 74: // STATE 133
		goto R999;

	case 75: // STATE 136
		;
	/* 0 */	((P0 *)_this)->members = trpt->bup.oval;
		;
		;
		goto R999;

	case 76: // STATE 138
		;
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 77: // STATE 141
		goto R999;
;
		;
		
	case 79: // STATE 145
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 80: // STATE 146
		;
		now.refused = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 82: // STATE 152
		;
	/* 0 */	((P0 *)_this)->members = trpt->bup.oval;
		;
		;
		goto R999;

	case 83: // STATE 154
		;
		now.outcome[ Index(((((P0 *)_this)->board*(2+1))+((P0 *)_this)->attempt), 6) ] = trpt->bup.oval;
		;
		goto R999;
;
		
	case 84: // STATE 157
		goto R999;
;
		;
		
	case 86: // STATE 161
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 87: // STATE 162
		;
		now.refused = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 89: // STATE 169
		;
		now.group_of[ Index(((P0 *)_this)->me, 3) ] = trpt->bup.oval;
		;
		goto R999;
;
		;
		;
		;
		
	case 92: // STATE 172
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 93: // STATE 173
		;
		now.died = trpt->bup.oval;
		;
		goto R999;
;
		;
		
	case 95: // STATE 176
		;
		now.faults = trpt->bup.oval;
		;
		goto R999;

	case 96: // STATE 177
		;
		now.stopped = trpt->bup.oval;
		;
		goto R999;

	case 97: // STATE 187
		;
		((P0 *)_this)->attempt = trpt->bup.oval;
		;
		goto R999;

	case 98: // STATE 190
		;
		now.said[ Index(((((P0 *)_this)->board*3)+((P0 *)_this)->me), 6) ] = trpt->bup.oval;
		;
		goto R999;

	case 99: // STATE 196
		;
		((P0 *)_this)->attempt = trpt->bup.ovals[2];
		((P0 *)_this)->board = trpt->bup.ovals[1];
	/* 0 */	((P0 *)_this)->board = trpt->bup.ovals[0];
		;
		;
		ungrab_ints(trpt->bup.ovals, 3);
		goto R999;

	case 100: // STATE 199
		;
		now.refused = trpt->bup.oval;
		;
		goto R999;

	case 101: // STATE 202
		;
		now.over = trpt->bup.oval;
		;
		goto R999;

	case 102: // STATE 203
		;
		p_restor(II);
		;
		;
		goto R999;
	}

