#ifdef PEG
struct T_SRC {
	char *fl; int ln;
} T_SRC[NTRANS];

void
tr_2_src(int m, char *file, int ln)
{	T_SRC[m].fl = file;
	T_SRC[m].ln = ln;
}

void
putpeg(int n, int m)
{	printf("%5d	trans %4d ", m, n);
	printf("%s:%d\n",
		T_SRC[n].fl, T_SRC[n].ln);
}
#endif

void
settable(void)
{	Trans *T;
	Trans *settr(int, int, int, int, int, char *, int, int, int);

	trans = (Trans ***) emalloc(7*sizeof(Trans **));

	/* proctype 5: only_chosen */

	trans[5] = (Trans **) emalloc(11*sizeof(Trans *));

	trans[5][7]	= settr(240,0,6,1,0,".(goto)", 0, 2, 0);
	T = trans[5][6] = settr(239,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(239,0,3,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(239,0,4,0,0,"DO", 0, 2, 0);
	T = trans[ 5][3] = settr(236,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(236,2,1,0,0,"ATOMIC", 1, 2, 0);
	trans[5][1]	= settr(234,0,6,3,3,"(!(((!(group_of[0])||((choice[group_of[0]]&1)&&(opened[group_of[0]]==(choice[group_of[0]]&7))))&&(!(group_of[1])||((choice[group_of[1]]&2)&&(opened[group_of[1]]==(choice[group_of[1]]&7)))))))", 1, 2, 0); /* m: 2 -> 6,0 */
	reached5[2] = 1;
	trans[5][2]	= settr(0,0,0,0,0,"assert(!(!(((!(group_of[0])||((choice[group_of[0]]&1)&&(opened[group_of[0]]==(choice[group_of[0]]&7))))&&(!(group_of[1])||((choice[group_of[1]]&2)&&(opened[group_of[1]]==(choice[group_of[1]]&7))))))))",0,0,0);
	trans[5][4]	= settr(237,0,6,1,0,"(1)", 0, 2, 0);
	trans[5][5]	= settr(238,0,6,1,0,"goto T0_init", 0, 2, 0);
	trans[5][8]	= settr(241,0,9,1,0,"break", 0, 2, 0);
	trans[5][9]	= settr(242,0,10,1,0,"(1)", 0, 2, 0);
	trans[5][10]	= settr(243,0,0,4,4,"-end-", 0, 3500, 0);

	/* proctype 4: silence_is_no_farewell */

	trans[4] = (Trans **) emalloc(11*sizeof(Trans *));

	trans[4][7]	= settr(230,0,6,1,0,".(goto)", 0, 2, 0);
	T = trans[4][6] = settr(229,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(229,0,3,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(229,0,4,0,0,"DO", 0, 2, 0);
	T = trans[ 4][3] = settr(226,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(226,2,1,0,0,"ATOMIC", 1, 2, 0);
	trans[4][1]	= settr(224,0,6,5,5,"(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2))))))))", 1, 2, 0); /* m: 2 -> 6,0 */
	reached4[2] = 1;
	trans[4][2]	= settr(0,0,0,0,0,"assert(!(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2)))))))))",0,0,0);
	trans[4][4]	= settr(227,0,6,1,0,"(1)", 0, 2, 0);
	trans[4][5]	= settr(228,0,6,1,0,"goto T0_init", 0, 2, 0);
	trans[4][8]	= settr(231,0,9,1,0,"break", 0, 2, 0);
	trans[4][9]	= settr(232,0,10,1,0,"(1)", 0, 2, 0);
	trans[4][10]	= settr(233,0,0,6,6,"-end-", 0, 3500, 0);

	/* proctype 3: one_group */

	trans[3] = (Trans **) emalloc(11*sizeof(Trans *));

	trans[3][7]	= settr(220,0,6,1,0,".(goto)", 0, 2, 0);
	T = trans[3][6] = settr(219,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(219,0,3,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(219,0,4,0,0,"DO", 0, 2, 0);
	T = trans[ 3][3] = settr(216,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(216,2,1,0,0,"ATOMIC", 1, 2, 0);
	trans[3][1]	= settr(214,0,6,7,7,"(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2))))))))", 1, 2, 0); /* m: 2 -> 6,0 */
	reached3[2] = 1;
	trans[3][2]	= settr(0,0,0,0,0,"assert(!(!(!(((((((group_of[0]&&group_of[1])&&(group_of[0]!=group_of[1]))&&!((died&(1<<0))))&&!((died&(1<<1))))||((((group_of[0]&&group_of[2])&&(group_of[0]!=group_of[2]))&&!((died&(1<<0))))&&!((died&(1<<2)))))||((((group_of[1]&&group_of[2])&&(group_of[1]!=group_of[2]))&&!((died&(1<<1))))&&!((died&(1<<2)))))))))",0,0,0);
	trans[3][4]	= settr(217,0,6,1,0,"(1)", 0, 2, 0);
	trans[3][5]	= settr(218,0,6,1,0,"goto T0_init", 0, 2, 0);
	trans[3][8]	= settr(221,0,9,1,0,"break", 0, 2, 0);
	trans[3][9]	= settr(222,0,10,1,0,"(1)", 0, 2, 0);
	trans[3][10]	= settr(223,0,0,8,8,"-end-", 0, 3500, 0);

	/* proctype 2: ends */

	trans[2] = (Trans **) emalloc(7*sizeof(Trans *));

	trans[2][4]	= settr(211,0,3,1,0,".(goto)", 0, 2, 0);
	T = trans[2][3] = settr(210,0,0,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(210,0,1,0,0,"DO", 0, 2, 0);
	trans[2][1]	= settr(208,0,3,9,0,"(!((over==3)))", 1, 2, 0);
	trans[2][2]	= settr(209,0,3,1,0,"goto T0_init", 0, 2, 0);
	trans[2][5]	= settr(212,0,6,1,0,"break", 0, 2, 0);
	trans[2][6]	= settr(213,0,0,10,10,"-end-", 0, 3500, 0);

	/* proctype 1: :init: */

	trans[1] = (Trans **) emalloc(6*sizeof(Trans *));

	T = trans[ 1][4] = settr(206,2,0,0,0,"ATOMIC", 0, 2, 0);
	T->nxt	= settr(206,2,1,0,0,"ATOMIC", 0, 2, 0);
	trans[1][1]	= settr(203,2,2,11,11,"(run rank(0))", 0, 2, 0);
	trans[1][2]	= settr(204,2,3,12,12,"(run rank(1))", 0, 2, 0);
	trans[1][3]	= settr(205,0,5,13,13,"(run rank(2))", 0, 2, 0);
	trans[1][5]	= settr(207,0,0,14,14,"-end-", 0, 3500, 0);

	/* proctype 0: rank */

	trans[0] = (Trans **) emalloc(204*sizeof(Trans *));

	trans[0][1]	= settr(0,0,2,15,0,"printf('MSC: %d says %d\\n',me,attempt)", 0, 2, 0);
	trans[0][2]	= settr(1,0,12,16,16,"said[((board*3)+me)] = attempt", 1, 2, 0);
	T = trans[0][12] = settr(11,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(11,0,3,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(11,0,7,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(11,0,11,0,0,"IF", 0, 2, 0);
	trans[0][3]	= settr(2,0,4,17,0,"((faults<2))", 1, 2, 0);
	trans[0][4]	= settr(3,0,5,18,18,"faults = (faults+1)", 1, 2, 0);
	trans[0][5]	= settr(4,0,202,19,19,"died = (died|(1<<me))", 1, 2, 0);
	trans[0][6]	= settr(5,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][13]	= settr(12,0,69,1,0,".(goto)", 0, 2, 0);
	trans[0][7]	= settr(6,0,8,20,0,"((faults<2))", 1, 2, 0);
	trans[0][8]	= settr(7,0,9,21,21,"faults = (faults+1)", 1, 2, 0);
	trans[0][9]	= settr(8,0,202,22,22,"stopped = (stopped|(1<<me))", 1, 2, 0);
	trans[0][10]	= settr(9,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][11]	= settr(10,0,69,1,0,"(1)", 0, 2, 0);
	T = trans[0][69] = settr(68,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(68,0,14,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(68,0,17,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(68,0,18,0,0,"IF", 0, 2, 0);
	trans[0][14]	= settr(13,0,15,23,0,"((faults<2))", 1, 2, 0);
	trans[0][15]	= settr(14,0,200,24,24,"faults = (faults+1)", 1, 2, 0);
	trans[0][16]	= settr(15,0,200,1,0,"goto lost", 0, 2, 0);
	trans[0][70]	= settr(69,0,71,1,0,".(goto)", 0, 2, 0);
	trans[0][17]	= settr(16,0,71,25,0,"(choice[((board*(2+1))+attempt)])", 1, 2, 0);
	trans[0][18]	= settr(17,0,40,26,0,"(!(choice[((board*(2+1))+attempt)]))", 1, 2, 0);
	T = trans[ 0][40] = settr(39,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(39,0,19,0,0,"sub-sequence", 0, 2, 0);
	trans[0][19]	= settr(18,0,37,27,27,"present = 0", 0, 2, 0); /* m: 20 -> 0,37 */
	reached0[20] = 1;
	trans[0][20]	= settr(0,0,0,0,0,"silent = 0",0,0,0);
	trans[0][21]	= settr(0,0,0,0,0,"i = 0",0,0,0);
	trans[0][38]	= settr(37,0,37,1,0,".(goto)", 0, 2, 0);
	T = trans[0][37] = settr(36,0,0,0,0,"DO", 0, 2, 0);
	T = T->nxt	= settr(36,0,22,0,0,"DO", 0, 2, 0);
	    T->nxt	= settr(36,0,35,0,0,"DO", 0, 2, 0);
	trans[0][22]	= settr(21,0,34,28,0,"((i<3))", 0, 2, 0);
	T = trans[ 0][34] = settr(33,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(33,2,31,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][31] = settr(30,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(30,2,23,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(30,2,24,0,0,"IF", 1, 2, 0);
	trans[0][23]	= settr(22,0,37,29,29,"(((said[((board*3)+i)]==9)||((i!=me)&&(died&(1<<i)))))", 1, 2, 0); /* m: 32 -> 37,0 */
	reached0[32] = 1;
	trans[0][32]	= settr(31,0,37,30,30,".(goto)", 1, 2, 0); /* m: 33 -> 0,37 */
	reached0[33] = 1;
	trans[0][24]	= settr(23,2,29,2,0,"else", 1, 2, 0);
	T = trans[0][29] = settr(28,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(28,2,25,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(28,2,27,0,0,"IF", 1, 2, 0);
	trans[0][25]	= settr(24,0,37,31,31,"((said[((board*3)+i)]>=attempt))", 1, 2, 0); /* m: 26 -> 37,0 */
	reached0[26] = 1;
	trans[0][26]	= settr(0,0,0,0,0,"present = (present|(1<<i))",0,0,0);
	trans[0][30]	= settr(29,2,32,1,0,".(goto)", 1, 2, 0); /* m: 32 -> 0,37 */
	reached0[32] = 1;
	trans[0][27]	= settr(26,2,28,2,0,"else", 1, 2, 0);
	trans[0][28]	= settr(27,0,37,32,32,"silent = (silent|(1<<i))", 1, 2, 0); /* m: 32 -> 0,37 */
	reached0[32] = 1;
	trans[0][33]	= settr(0,0,0,0,0,"i = (i+1)",0,0,0);
	trans[0][35]	= settr(34,0,67,2,0,"else", 0, 2, 0);
	trans[0][36]	= settr(35,0,67,1,0,"goto :b0", 0, 2, 0);
	trans[0][39]	= settr(38,0,67,1,0,"break", 0, 2, 0);
	T = trans[0][67] = settr(66,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(66,0,41,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(66,0,65,0,0,"IF", 0, 2, 0);
	trans[0][41]	= settr(40,0,46,33,0,"(((silent==0)||1))", 0, 2, 0);
	T = trans[0][46] = settr(45,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(45,0,42,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(45,0,44,0,0,"IF", 0, 2, 0);
	trans[0][42]	= settr(41,0,57,34,34,"((silent&&((((present&1)+((present>>1)&1))+((present>>2)&1))<=(((silent&1)+((silent>>1)&1))+((silent>>2)&1)))))", 0, 2, 0); /* m: 43 -> 57,0 */
	reached0[43] = 1;
	trans[0][43]	= settr(0,0,0,0,0,"members = (8|16)",0,0,0);
	trans[0][47]	= settr(46,0,57,1,0,".(goto)", 0, 2, 0);
	trans[0][44]	= settr(43,0,45,2,0,"else", 0, 2, 0);
	trans[0][45]	= settr(44,0,57,35,35,"members = (8|present)", 0, 2, 0);
	T = trans[0][57] = settr(56,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(56,0,48,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(56,0,52,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(56,0,56,0,0,"IF", 0, 2, 0);
	trans[0][48]	= settr(47,0,49,36,0,"((faults<2))", 1, 2, 0);
	trans[0][49]	= settr(48,0,50,37,37,"faults = (faults+1)", 1, 2, 0);
	trans[0][50]	= settr(49,0,202,38,38,"died = (died|(1<<me))", 1, 2, 0);
	trans[0][51]	= settr(50,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][58]	= settr(57,0,64,1,0,".(goto)", 0, 2, 0);
	trans[0][52]	= settr(51,0,53,39,0,"((faults<2))", 1, 2, 0);
	trans[0][53]	= settr(52,0,54,40,40,"faults = (faults+1)", 1, 2, 0);
	trans[0][54]	= settr(53,0,202,41,41,"stopped = (stopped|(1<<me))", 1, 2, 0);
	trans[0][55]	= settr(54,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][56]	= settr(55,0,64,1,0,"(1)", 0, 2, 0);
	T = trans[ 0][64] = settr(63,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(63,2,62,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][62] = settr(61,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(61,2,59,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(61,2,61,0,0,"IF", 1, 2, 0);
	trans[0][59]	= settr(58,0,71,42,42,"(!(choice[((board*(2+1))+attempt)]))", 1, 2, 0); /* m: 60 -> 71,0 */
	reached0[60] = 1;
	trans[0][60]	= settr(0,0,0,0,0,"choice[((board*(2+1))+attempt)] = members",0,0,0);
	trans[0][63]	= settr(62,0,71,43,43,".(goto)", 1, 2, 0);
	trans[0][61]	= settr(60,2,63,2,0,"else", 1, 2, 0);
	trans[0][68]	= settr(67,0,71,1,0,".(goto)", 0, 2, 0);
	trans[0][65]	= settr(64,0,69,44,44,"((silent&&!(1)))", 0, 2, 0);
	trans[0][66]	= settr(65,0,69,1,0,"goto wait_for_choice", 0, 2, 0);
	trans[0][71]	= settr(70,0,76,45,45,"members = choice[((board*(2+1))+attempt)]", 1, 2, 0);
	T = trans[0][76] = settr(75,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(75,0,72,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(75,0,75,0,0,"IF", 0, 2, 0);
	trans[0][72]	= settr(71,0,73,46,46,"((members&16))", 0, 2, 0);
	trans[0][73]	= settr(72,0,202,47,47,"refused = (refused|(1<<me))", 1, 2, 0);
	trans[0][74]	= settr(73,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][77]	= settr(76,0,78,1,0,".(goto)", 0, 2, 0); /* m: 78 -> 0,102 */
	reached0[78] = 1;
	trans[0][75]	= settr(74,0,78,2,0,"else", 0, 2, 0);
	trans[0][78]	= settr(77,0,102,48,48,"members = (members&7)", 0, 2, 0);
	T = trans[0][102] = settr(101,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(101,0,79,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(101,0,101,0,0,"IF", 0, 2, 0);
	trans[0][79]	= settr(78,0,92,49,0,"(!((members&(1<<me))))", 0, 2, 0);
	T = trans[0][92] = settr(91,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(91,0,80,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(91,0,81,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(91,0,89,0,0,"IF", 0, 2, 0);
	trans[0][80]	= settr(79,0,99,50,0,"(outcome[((board*(2+1))+attempt)])", 1, 2, 0);
	trans[0][93]	= settr(92,0,99,1,0,".(goto)", 0, 2, 0);
	trans[0][81]	= settr(80,0,88,51,51,"((((members&died)==members)||1))", 1, 2, 0);
	T = trans[ 0][88] = settr(87,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(87,0,87,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 0][87] = settr(86,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(86,2,85,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][85] = settr(84,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(84,2,82,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(84,2,84,0,0,"IF", 1, 2, 0);
	trans[0][82]	= settr(81,0,99,52,52,"((outcome[((board*(2+1))+attempt)]==0))", 1, 2, 0); /* m: 83 -> 99,0 */
	reached0[83] = 1;
	trans[0][83]	= settr(0,0,0,0,0,"outcome[((board*(2+1))+attempt)] = 2",0,0,0);
	trans[0][86]	= settr(85,0,99,53,53,".(goto)", 1, 2, 0);
	trans[0][84]	= settr(83,2,86,2,0,"else", 1, 2, 0);
	trans[0][89]	= settr(88,0,90,54,0,"((faults<2))", 1, 2, 0);
	trans[0][90]	= settr(89,0,200,55,55,"faults = (faults+1)", 1, 2, 0);
	trans[0][91]	= settr(90,0,200,1,0,"goto lost", 0, 2, 0);
	T = trans[0][99] = settr(98,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(98,0,94,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(98,0,97,0,0,"IF", 0, 2, 0);
	trans[0][94]	= settr(93,0,95,56,56,"((outcome[((board*(2+1))+attempt)]==1))", 1, 2, 0);
	trans[0][95]	= settr(94,0,202,57,57,"refused = (refused|(1<<me))", 1, 2, 0);
	trans[0][96]	= settr(95,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][100]	= settr(99,0,113,1,0,".(goto)", 0, 2, 0);
	trans[0][97]	= settr(96,0,192,2,0,"else", 0, 2, 0);
	trans[0][98]	= settr(97,0,192,1,0,"goto next", 0, 2, 0);
	trans[0][103]	= settr(102,0,113,1,0,".(goto)", 0, 2, 0);
	trans[0][101]	= settr(100,0,113,2,0,"else", 0, 2, 0);
	T = trans[0][113] = settr(112,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(112,0,104,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(112,0,108,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(112,0,112,0,0,"IF", 0, 2, 0);
	trans[0][104]	= settr(103,0,105,58,0,"((faults<2))", 1, 2, 0);
	trans[0][105]	= settr(104,0,106,59,59,"faults = (faults+1)", 1, 2, 0);
	trans[0][106]	= settr(105,0,202,60,60,"died = (died|(1<<me))", 1, 2, 0);
	trans[0][107]	= settr(106,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][114]	= settr(113,0,115,1,0,".(goto)", 0, 2, 0);
	trans[0][108]	= settr(107,0,109,61,0,"((faults<2))", 1, 2, 0);
	trans[0][109]	= settr(108,0,110,62,62,"faults = (faults+1)", 1, 2, 0);
	trans[0][110]	= settr(109,0,202,63,63,"stopped = (stopped|(1<<me))", 1, 2, 0);
	trans[0][111]	= settr(110,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][112]	= settr(111,0,115,1,0,"(1)", 0, 2, 0);
	trans[0][115]	= settr(114,0,125,64,64,"opened[((board*(2+1))+attempt)] = (opened[((board*(2+1))+attempt)]|(1<<me))", 1, 2, 0);
	T = trans[0][125] = settr(124,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(124,0,116,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(124,0,120,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(124,0,124,0,0,"IF", 0, 2, 0);
	trans[0][116]	= settr(115,0,117,65,0,"((faults<2))", 1, 2, 0);
	trans[0][117]	= settr(116,0,118,66,66,"faults = (faults+1)", 1, 2, 0);
	trans[0][118]	= settr(117,0,202,67,67,"died = (died|(1<<me))", 1, 2, 0);
	trans[0][119]	= settr(118,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][126]	= settr(125,0,166,1,0,".(goto)", 0, 2, 0);
	trans[0][120]	= settr(119,0,121,68,0,"((faults<2))", 1, 2, 0);
	trans[0][121]	= settr(120,0,122,69,69,"faults = (faults+1)", 1, 2, 0);
	trans[0][122]	= settr(121,0,202,70,70,"stopped = (stopped|(1<<me))", 1, 2, 0);
	trans[0][123]	= settr(122,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][124]	= settr(123,0,166,1,0,"(1)", 0, 2, 0);
	T = trans[0][166] = settr(165,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(165,0,127,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(165,0,150,0,0,"IF", 0, 2, 0);
	trans[0][127]	= settr(126,0,148,71,0,"(!((members&((1<<me)-1))))", 0, 2, 0);
	T = trans[0][148] = settr(147,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(147,0,128,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(147,0,136,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(147,0,144,0,0,"IF", 0, 2, 0);
	trans[0][128]	= settr(127,0,135,72,72,"((opened[((board*(2+1))+attempt)]==members))", 1, 2, 0);
	T = trans[ 0][135] = settr(134,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(134,0,134,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 0][134] = settr(133,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(133,2,132,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][132] = settr(131,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(131,2,129,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(131,2,131,0,0,"IF", 1, 2, 0);
	trans[0][129]	= settr(128,0,184,73,73,"((outcome[((board*(2+1))+attempt)]==0))", 1, 2, 0); /* m: 130 -> 184,0 */
	reached0[130] = 1;
	trans[0][130]	= settr(0,0,0,0,0,"outcome[((board*(2+1))+attempt)] = 1",0,0,0);
	trans[0][133]	= settr(132,0,184,74,74,".(goto)", 1, 2, 0);
	trans[0][131]	= settr(130,2,133,2,0,"else", 1, 2, 0);
	trans[0][149]	= settr(148,0,184,1,0,".(goto)", 0, 2, 0);
	trans[0][136]	= settr(135,0,143,75,75,"((((members&died)||outcome[((board*(2+1))+attempt)])||1))", 1, 2, 0);
	T = trans[ 0][143] = settr(142,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(142,0,142,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 0][142] = settr(141,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(141,2,140,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][140] = settr(139,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(139,2,137,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(139,2,139,0,0,"IF", 1, 2, 0);
	trans[0][137]	= settr(136,0,184,76,76,"((outcome[((board*(2+1))+attempt)]==0))", 1, 2, 0); /* m: 138 -> 184,0 */
	reached0[138] = 1;
	trans[0][138]	= settr(0,0,0,0,0,"outcome[((board*(2+1))+attempt)] = 2",0,0,0);
	trans[0][141]	= settr(140,0,184,77,77,".(goto)", 1, 2, 0);
	trans[0][139]	= settr(138,2,141,2,0,"else", 1, 2, 0);
	trans[0][144]	= settr(143,0,145,78,0,"((faults<2))", 1, 2, 0);
	trans[0][145]	= settr(144,0,146,79,79,"faults = (faults+1)", 1, 2, 0);
	trans[0][146]	= settr(145,0,202,80,80,"refused = (refused|(1<<me))", 1, 2, 0);
	trans[0][147]	= settr(146,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][167]	= settr(166,0,184,1,0,".(goto)", 0, 2, 0);
	trans[0][150]	= settr(149,0,164,2,0,"else", 0, 2, 0);
	T = trans[0][164] = settr(163,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(163,0,151,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(163,0,152,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(163,0,160,0,0,"IF", 0, 2, 0);
	trans[0][151]	= settr(150,0,184,81,0,"(outcome[((board*(2+1))+attempt)])", 1, 2, 0);
	trans[0][165]	= settr(164,0,184,1,0,".(goto)", 0, 2, 0);
	trans[0][152]	= settr(151,0,159,82,82,"(((members&died)||1))", 1, 2, 0);
	T = trans[ 0][159] = settr(158,0,0,0,0,"sub-sequence", 0, 2, 0);
	T->nxt	= settr(158,0,158,0,0,"sub-sequence", 0, 2, 0);
	T = trans[ 0][158] = settr(157,2,0,0,0,"ATOMIC", 1, 2, 0);
	T->nxt	= settr(157,2,156,0,0,"ATOMIC", 1, 2, 0);
	T = trans[0][156] = settr(155,2,0,0,0,"IF", 1, 2, 0);
	T = T->nxt	= settr(155,2,153,0,0,"IF", 1, 2, 0);
	    T->nxt	= settr(155,2,155,0,0,"IF", 1, 2, 0);
	trans[0][153]	= settr(152,0,184,83,83,"((outcome[((board*(2+1))+attempt)]==0))", 1, 2, 0); /* m: 154 -> 184,0 */
	reached0[154] = 1;
	trans[0][154]	= settr(0,0,0,0,0,"outcome[((board*(2+1))+attempt)] = 2",0,0,0);
	trans[0][157]	= settr(156,0,184,84,84,".(goto)", 1, 2, 0);
	trans[0][155]	= settr(154,2,157,2,0,"else", 1, 2, 0);
	trans[0][160]	= settr(159,0,161,85,0,"((faults<2))", 1, 2, 0);
	trans[0][161]	= settr(160,0,162,86,86,"faults = (faults+1)", 1, 2, 0);
	trans[0][162]	= settr(161,0,202,87,87,"refused = (refused|(1<<me))", 1, 2, 0);
	trans[0][163]	= settr(162,0,202,1,0,"goto ends", 0, 2, 0);
	T = trans[0][184] = settr(183,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(183,0,168,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(183,0,183,0,0,"IF", 0, 2, 0);
	trans[0][168]	= settr(167,0,169,88,0,"((outcome[((board*(2+1))+attempt)]==1))", 1, 2, 0);
	trans[0][169]	= settr(168,0,170,89,89,"group_of[me] = ((board*(2+1))+attempt)", 1, 2, 0);
	trans[0][170]	= settr(169,0,180,90,0,"printf('MSC: %d goes on\\n',me)", 0, 2, 0);
	T = trans[0][180] = settr(179,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(179,0,171,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(179,0,175,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(179,0,179,0,0,"IF", 0, 2, 0);
	trans[0][171]	= settr(170,0,172,91,0,"((faults<2))", 1, 2, 0);
	trans[0][172]	= settr(171,0,173,92,92,"faults = (faults+1)", 1, 2, 0);
	trans[0][173]	= settr(172,0,202,93,93,"died = (died|(1<<me))", 1, 2, 0);
	trans[0][174]	= settr(173,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][181]	= settr(180,0,202,1,0,".(goto)", 0, 2, 0);
	trans[0][175]	= settr(174,0,176,94,0,"((faults<2))", 1, 2, 0);
	trans[0][176]	= settr(175,0,177,95,95,"faults = (faults+1)", 1, 2, 0);
	trans[0][177]	= settr(176,0,202,96,96,"stopped = (stopped|(1<<me))", 1, 2, 0);
	trans[0][178]	= settr(177,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][179]	= settr(178,0,202,1,0,"(1)", 0, 2, 0);
	trans[0][182]	= settr(181,0,202,1,0,"goto ends", 0, 2, 0);
	trans[0][185]	= settr(184,0,192,1,0,".(goto)", 0, 2, 0);
	trans[0][183]	= settr(182,0,192,2,0,"else", 0, 2, 0);
	T = trans[0][192] = settr(191,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(191,0,186,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(191,0,189,0,0,"IF", 0, 2, 0);
	trans[0][186]	= settr(185,0,1,97,97,"((attempt<2))", 0, 2, 0); /* m: 187 -> 1,0 */
	reached0[187] = 1;
	trans[0][187]	= settr(0,0,0,0,0,"attempt = (attempt+1)",0,0,0);
	trans[0][188]	= settr(187,0,1,1,0,"goto come", 0, 2, 0);
	trans[0][193]	= settr(192,0,200,1,0,".(goto)", 0, 2, 0);
	trans[0][189]	= settr(188,0,190,2,0,"else", 0, 2, 0);
	trans[0][190]	= settr(189,0,202,98,98,"said[((board*3)+me)] = 9", 1, 2, 0);
	trans[0][191]	= settr(190,0,202,1,0,"goto ends", 0, 2, 0);
	T = trans[0][200] = settr(199,0,0,0,0,"IF", 0, 2, 0);
	T = T->nxt	= settr(199,0,194,0,0,"IF", 0, 2, 0);
	    T->nxt	= settr(199,0,198,0,0,"IF", 0, 2, 0);
	trans[0][194]	= settr(193,0,1,99,99,"((board==0))", 0, 2, 0); /* m: 195 -> 1,0 */
	reached0[195] = 1;
	trans[0][195]	= settr(0,0,0,0,0,"board = 1",0,0,0);
	trans[0][196]	= settr(0,0,0,0,0,"attempt = 1",0,0,0);
	trans[0][197]	= settr(196,0,1,1,0,"goto come", 0, 2, 0);
	trans[0][201]	= settr(200,0,202,1,0,".(goto)", 0, 2, 0);
	trans[0][198]	= settr(197,0,199,2,0,"else", 0, 2, 0);
	trans[0][199]	= settr(198,0,202,100,100,"refused = (refused|(1<<me))", 1, 2, 0);
	trans[0][202]	= settr(201,0,203,101,101,"over = (over+1)", 1, 2, 0);
	trans[0][203]	= settr(202,0,0,102,102,"-end-", 0, 3500, 0);
	/* np_ demon: */
	trans[_NP_] = (Trans **) emalloc(3*sizeof(Trans *));
	T = trans[_NP_][0] = settr(9997,0,1,_T5,0,"(np_)", 1,2,0);
	    T->nxt	  = settr(9998,0,0,_T2,0,"(1)",   0,2,0);
	T = trans[_NP_][1] = settr(9999,0,1,_T5,0,"(np_)", 1,2,0);
}

Trans *
settr(	int t_id, int a, int b, int c, int d,
	char *t, int g, int tpe0, int tpe1)
{	Trans *tmp = (Trans *) emalloc(sizeof(Trans));

	tmp->atom  = a&(6|32);	/* only (2|8|32) have meaning */
	if (!g) tmp->atom |= 8;	/* no global references */
	tmp->st    = b;
	tmp->tpe[0] = tpe0;
	tmp->tpe[1] = tpe1;
	tmp->tp    = t;
	tmp->t_id  = t_id;
	tmp->forw  = c;
	tmp->back  = d;
	return tmp;
}

Trans *
cpytr(Trans *a)
{	Trans *tmp = (Trans *) emalloc(sizeof(Trans));

	int i;
	tmp->atom  = a->atom;
	tmp->st    = a->st;
#ifdef HAS_UNLESS
	tmp->e_trans = a->e_trans;
	for (i = 0; i < HAS_UNLESS; i++)
		tmp->escp[i] = a->escp[i];
#endif
	tmp->tpe[0] = a->tpe[0];
	tmp->tpe[1] = a->tpe[1];
	for (i = 0; i < 6; i++)
	{	tmp->qu[i] = a->qu[i];
		tmp->ty[i] = a->ty[i];
	}
	tmp->tp    = (char *) emalloc(strlen(a->tp)+1);
	strcpy(tmp->tp, a->tp);
	tmp->t_id  = a->t_id;
	tmp->forw  = a->forw;
	tmp->back  = a->back;
	return tmp;
}

#ifndef NOREDUCE
int
srinc_set(int n)
{	if (n <= 2) return LOCAL;
	if (n <= 2+  DELTA) return Q_FULL_F; /* 's' or nfull  */
	if (n <= 2+2*DELTA) return Q_EMPT_F; /* 'r' or nempty */
	if (n <= 2+3*DELTA) return Q_EMPT_T; /* empty */
	if (n <= 2+4*DELTA) return Q_FULL_T; /* full  */
	if (n ==   5*DELTA) return GLOBAL;
	if (n ==   6*DELTA) return TIMEOUT_F;
	if (n ==   7*DELTA) return ALPHA_F;
	Uerror("cannot happen srinc_class");
	return BAD;
}
int
srunc(int n, int m)
{	switch(m) {
	case Q_FULL_F: return n-2;
	case Q_EMPT_F: return n-2-DELTA;
	case Q_EMPT_T: return n-2-2*DELTA;
	case Q_FULL_T: return n-2-3*DELTA;
	case ALPHA_F:
	case TIMEOUT_F: return 257; /* non-zero, and > MAXQ */
	}
	Uerror("cannot happen srunc");
	return 0;
}
#endif
int cnt;
#ifdef HAS_UNLESS
int
isthere(Trans *a, int b)
{	Trans *t;
	for (t = a; t; t = t->nxt)
		if (t->t_id == b)
			return 1;
	return 0;
}
#endif
#ifndef NOREDUCE
int
mark_safety(Trans *t) /* for conditional safety */
{	int g = 0, i, j, k;

	if (!t) return 0;
	if (t->qu[0])
		return (t->qu[1])?2:1;	/* marked */

	for (i = 0; i < 2; i++)
	{	j = srinc_set(t->tpe[i]);
		if (j >= GLOBAL && j != ALPHA_F)
			return -1;
		if (j != LOCAL)
		{	k = srunc(t->tpe[i], j);
			if (g == 0
			||  t->qu[0] != k
			||  t->ty[0] != j)
			{	t->qu[g] = k;
				t->ty[g] = j;
				g++;
	}	}	}
	return g;
}
#endif
void
retrans(int n, int m, int is, short srcln[], uchar reach[], uchar lpstate[])
	/* process n, with m states, is=initial state */
{	Trans *T0, *T1, *T2, *T3;
	Trans *T4, *T5; /* t_reverse or has_unless */
	int i;
#if defined(HAS_UNLESS) || !defined(NOREDUCE)
	int k;
#endif
#ifndef NOREDUCE
	int g, h, j, aa;
#endif
#ifdef HAS_UNLESS
	int p;
#endif
	if (state_tables >= 4)
	{	printf("STEP 1 %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
		return;
	}
	do {
		for (i = 1, cnt = 0; i < m; i++)
		{	T2 = trans[n][i];
			T1 = T2?T2->nxt:(Trans *)0;
/* prescan: */		for (T0 = T1; T0; T0 = T0->nxt)
/* choice in choice */	{	if (T0->st && trans[n][T0->st]
				&&  trans[n][T0->st]->nxt)
					break;
			}
#if 0
		if (T0)
		printf("\tstate %d / %d: choice in choice\n",
		i, T0->st);
#endif
			if (T0)
			for (T0 = T1; T0; T0 = T0->nxt)
			{	T3 = trans[n][T0->st];
				if (!T3->nxt)
				{	T2->nxt = cpytr(T0);
					T2 = T2->nxt;
					imed(T2, T0->st, n, i);
					continue;
				}
				do {	T3 = T3->nxt;
					T2->nxt = cpytr(T3);
					T2 = T2->nxt;
					imed(T2, T0->st, n, i);
				} while (T3->nxt);
				cnt++;
			}
		}
	} while (cnt);
	if (state_tables >= 3)
	{	printf("STEP 2 %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
		return;
	}
	for (i = 1; i < m; i++)
	{	if (trans[n][i] && trans[n][i]->nxt) /* optimize */
		{	T1 = trans[n][i]->nxt;
#if 0
			printf("\t\tpull %d (%d) to %d\n",
			T1->st, T1->forw, i);
#endif
			srcln[i] = srcln[T1->st];	/* Oyvind Teig, 5.2.0 */

			if (!trans[n][T1->st]) continue;
			T0 = cpytr(trans[n][T1->st]);
			trans[n][i] = T0;
			reach[T1->st] = 1;
			imed(T0, T1->st, n, i);
			for (T1 = T1->nxt; T1; T1 = T1->nxt)
			{
#if 0
			printf("\t\tpull %d (%d) to %d\n",
				T1->st, T1->forw, i);
#endif
		/*		srcln[i] = srcln[T1->st];  gh: not useful */
				if (!trans[n][T1->st]) continue;
				T0->nxt = cpytr(trans[n][T1->st]);
				T0 = T0->nxt;
				reach[T1->st] = 1;
				imed(T0, T1->st, n, i);
	}	}	}
	if (state_tables >= 2)
	{	printf("STEP 3 %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
		return;
	}
#ifdef HAS_UNLESS
	for (i = 1; i < m; i++)
	{	if (!trans[n][i]) continue;
		/* check for each state i if an
		 * escape to some state p is defined
		 * if so, copy and mark p's transitions
		 * and prepend them to the transition-
		 * list of state i
		 */
	 if (!like_java) /* the default */
	 {	for (T0 = trans[n][i]; T0; T0 = T0->nxt)
		for (k = HAS_UNLESS-1; k >= 0; k--)
		{	if (p = T0->escp[k])
			for (T1 = trans[n][p]; T1; T1 = T1->nxt)
			{	if (isthere(trans[n][i], T1->t_id))
					continue;
				T2 = cpytr(T1);
				T2->e_trans = p;
				T2->nxt = trans[n][i];
				trans[n][i] = T2;
		}	}
	 } else /* outermost unless checked first */
	 {	T4 = T3 = (Trans *) 0;
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
		for (k = HAS_UNLESS-1; k >= 0; k--)
		{	if (p = T0->escp[k])
			for (T1 = trans[n][p]; T1; T1 = T1->nxt)
			{	if (isthere(trans[n][i], T1->t_id))
					continue;
				T2 = cpytr(T1);
				T2->nxt = (Trans *) 0;
				T2->e_trans = p;
				if (T3)	T3->nxt = T2;
				else	T4 = T2;
				T3 = T2;
		}	}
		if (T4)
		{	T3->nxt = trans[n][i];
			trans[n][i] = T4;
		}
	 }
	}
#endif
#ifndef NOREDUCE
	for (i = 1; i < m; i++)
	{	if (a_cycles)
		{ /* moves through these states are visible */
	#if PROG_LAB>0 && defined(HAS_NP)
			if (progstate[n][i])
				goto degrade;
			for (T1 = trans[n][i]; T1; T1 = T1->nxt)
				if (progstate[n][T1->st])
					goto degrade;
	#endif
			if (accpstate[n][i] || visstate[n][i])
				goto degrade;
			for (T1 = trans[n][i]; T1; T1 = T1->nxt)
				if (accpstate[n][T1->st])
					goto degrade;
		}
		T1 = trans[n][i];
		if (!T1) continue;
		g = mark_safety(T1);	/* V3.3.1 */
		if (g < 0) goto degrade; /* global */
		/* check if mixing of guards preserves reduction */
		if (T1->nxt)
		{	k = 0;
			for (T0 = T1; T0; T0 = T0->nxt)
			{	if (!(T0->atom&8))
					goto degrade;
				for (aa = 0; aa < 2; aa++)
				{	j = srinc_set(T0->tpe[aa]);
					if (j >= GLOBAL && j != ALPHA_F)
						goto degrade;
					if (T0->tpe[aa]
					&&  T0->tpe[aa]
					!=  T1->tpe[0])
						k = 1;
			}	}
			/* g = 0;	V3.3.1 */
			if (k)	/* non-uniform selection */
			for (T0 = T1; T0; T0 = T0->nxt)
			for (aa = 0; aa < 2; aa++)
			{	j = srinc_set(T0->tpe[aa]);
				if (j != LOCAL)
				{	k = srunc(T0->tpe[aa], j);
					for (h = 0; h < 6; h++)
						if (T1->qu[h] == k
						&&  T1->ty[h] == j)
							break;
					if (h >= 6)
					{	T1->qu[g%6] = k;
						T1->ty[g%6] = j;
						g++;
			}	}	}
			if (g > 6)
			{	T1->qu[0] = 0;	/* turn it off */
				printf("pan: warning, line %d, ",
					srcln[i]);
			 	printf("too many stmnt types (%d)",
					g);
			  	printf(" in selection\n");
			  goto degrade;
			}
		}
		/* mark all options global if >=1 is global */
		for (T1 = trans[n][i]; T1; T1 = T1->nxt)
			if (!(T1->atom&8)) break;
		if (T1)
degrade:	for (T1 = trans[n][i]; T1; T1 = T1->nxt)
			T1->atom &= ~8;	/* mark as unsafe */
		/* can only mix 'r's or 's's if on same chan */
		/* and not mixed with other local operations */
		T1 = trans[n][i];
		if (!T1 || T1->qu[0]) continue;
		j = T1->tpe[0];
		if (T1->nxt && T1->atom&8)
		{ if (j == 5*DELTA)
		  {	printf("warning: line %d ", srcln[i]);
			printf("mixed condition ");
			printf("(defeats reduction)\n");
			goto degrade;
		  }
		  for (T0 = T1; T0; T0 = T0->nxt)
		  for (aa = 0; aa < 2; aa++)
		  if  (T0->tpe[aa] && T0->tpe[aa] != j)
		  {	printf("warning: line %d ", srcln[i]);
			printf("[%d-%d] mixed %stion ",
				T0->tpe[aa], j, 
				(j==5*DELTA)?"condi":"selec");
			printf("(defeats reduction)\n");
			printf("	'%s' <-> '%s'\n",
				T1->tp, T0->tp);
			goto degrade;
		} }
	}
#endif
	for (i = 1; i < m; i++)
	{	T2 = trans[n][i];
		if (!T2
		||  T2->nxt
		||  strncmp(T2->tp, ".(goto)", 7)
		||  !stopstate[n][i])
			continue;
		stopstate[n][T2->st] = 1;
	}
	if (state_tables && !verbose)
	{	if (dodot)
		{	char buf[256], *q = buf, *p = procname[n];
			while (*p != '\0')
			{	if (*p != ':')
				{	*q++ = *p;
				}
				p++;
			}
			*q = '\0';
			printf("digraph ");
			switch (Btypes[n]) {
			case I_PROC:  printf("init {\n"); break;
			case N_CLAIM: printf("claim_%s {\n", buf); break;
			case E_TRACE: printf("notrace {\n"); break;
			case N_TRACE: printf("trace {\n"); break;
			default:      printf("p_%s {\n", buf); break;
			}
			printf("size=\"8,10\";\n");
			printf("  GT [shape=box,style=dotted,label=\"%s\"];\n", buf);
			printf("  GT -> S%d;\n", is);
		} else
		{	switch (Btypes[n]) {
			case I_PROC:  printf("init\n"); break;
			case N_CLAIM: printf("claim %s\n", procname[n]); break;
			case E_TRACE: printf("notrace assertion\n"); break;
			case N_TRACE: printf("trace assertion\n"); break;
			default:      printf("proctype %s\n", procname[n]); break;
		}	}
		for (i = 1; i < m; i++)
		{	reach[i] = 1;
		}
		tagtable(n, m, is, srcln, reach);
		if (dodot) printf("}\n");
	} else
	for (i = 1; i < m; i++)
	{	int nrelse;
		if (Btypes[n] != N_CLAIM)
		{	for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			{	if (T0->st == i
				&& strcmp(T0->tp, "(1)") == 0)
				{	printf("error: proctype '%s' ",
						procname[n]);
		  			printf("line %d, state %d: has un",
						srcln[i], i);
					printf("conditional self-loop\n");
					pan_exit(1);
		}	}	}
		nrelse = 0;
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
		{	if (strcmp(T0->tp, "else") == 0)
				nrelse++;
		}
		if (nrelse > 1)
		{	printf("error: proctype '%s' state",
				procname[n]);
		  	printf(" %d, inherits %d", i, nrelse);
		  	printf(" 'else' stmnts\n");
			pan_exit(1);
	}	}
#if !defined(LOOPSTATE) && !defined(BFS_PAR)
	if (state_tables)
#endif
	do_dfs(n, m, is, srcln, reach, lpstate);

	if (!t_reverse)
	{	return;
	}
	/* process n, with m states, is=initial state -- reverse list */
	if (!state_tables && Btypes[n] != N_CLAIM)
	{	for (i = 1; i < m; i++)
		{	Trans *Tx = (Trans *) 0; /* list of escapes */
			Trans *Ty = (Trans *) 0; /* its tail element */
			T1 = (Trans *) 0; /* reversed list */
			T2 = (Trans *) 0; /* its tail */
			T3 = (Trans *) 0; /* remembers possible 'else' */

			/* find unless-escapes, they should go first */
			T4 = T5 = T0 = trans[n][i];
	#ifdef HAS_UNLESS
			while (T4 && T4->e_trans) /* escapes are first in orig list */
			{	T5 = T4;	  /* remember predecessor */
				T4 = T4->nxt;
			}
	#endif
			/* T4 points to first non-escape, T5 to its parent, T0 to original list */
			if (T4 != T0)		 /* there was at least one escape */
			{	T3 = T5->nxt;		 /* start of non-escapes */
				T5->nxt = (Trans *) 0;	 /* separate */
				Tx = T0;		 /* start of the escapes */
				Ty = T5;		 /* its tail */
				T0 = T3;		 /* the rest, to be reversed */
			}
			/* T0 points to first non-escape, Tx to the list of escapes, Ty to its tail */

			/* first tail-add non-escape transitions, reversed */
			T3 = (Trans *) 0;
			for (T5 = T0; T5; T5 = T4)
			{	T4 = T5->nxt;
	#ifdef HAS_UNLESS
				if (T5->e_trans)
				{	printf("error: cannot happen!\n");
					continue;
				}
	#endif
				if (strcmp(T5->tp, "else") == 0)
				{	T3 = T5;
					T5->nxt = (Trans *) 0;
				} else
				{	T5->nxt = T1;
					if (!T1) { T2 = T5; }
					T1 = T5;
			}	}
			/* T3 points to a possible else, which is removed from the list */
			/* T1 points to the reversed list so far (without escapes) */
			/* T2 points to the tail element -- where the else should go */
			if (T2 && T3)
			{	T2->nxt = T3;	/* add else */
			} else
			{	if (T3) /* there was an else, but there's no tail */
				{	if (!T1)	/* and no reversed list */
					{	T1 = T3; /* odd, but possible */
					} else		/* even stranger */
					{	T1->nxt = T3;
			}	}	}

			/* add in the escapes, to that they appear at the front */
			if (Tx && Ty) { Ty->nxt = T1; T1 = Tx; }

			trans[n][i] = T1;
			/* reversed, with escapes first and else last */
	}	}
	if (state_tables && verbose)
	{	printf("FINAL proctype %s\n", 
			procname[n]);
		for (i = 1; i < m; i++)
		for (T0 = trans[n][i]; T0; T0 = T0->nxt)
			crack(n, i, T0, srcln);
	}
}
void
imed(Trans *T, int v, int n, int j)	/* set intermediate state */
{	progstate[n][T->st] |= progstate[n][v];
	accpstate[n][T->st] |= accpstate[n][v];
	stopstate[n][T->st] |= stopstate[n][v];
	mapstate[n][j] = T->st;
}
void
tagtable(int n, int m, int is, short srcln[], uchar reach[])
{	Trans *z;

	if (is >= m || !trans[n][is]
	||  is <= 0 || reach[is] == 0)
		return;
	reach[is] = 0;
	if (state_tables)
	for (z = trans[n][is]; z; z = z->nxt)
	{	if (dodot)
			dot_crack(n, is, z);
		else
			crack(n, is, z, srcln);
	}

	for (z = trans[n][is]; z; z = z->nxt)
	{
#ifdef HAS_UNLESS
		int i, j;
#endif
		tagtable(n, m, z->st, srcln, reach);
#ifdef HAS_UNLESS
		for (i = 0; i < HAS_UNLESS; i++)
		{	j = trans[n][is]->escp[i];
			if (!j) break;
			tagtable(n, m, j, srcln, reach);
		}
#endif
	}
}

extern Trans *t_id_lkup[];

void
dfs_table(int n, int m, int is, short srcln[], uchar reach[], uchar lpstate[])
{	Trans *z;

	if (is >= m || is <= 0 || !trans[n][is])
		return;
	if ((reach[is] & (4|8|16)) != 0)
	{	if ((reach[is] & (8|16)) == 16)	/* on stack, not yet recorded */
		{	lpstate[is] = 1;
			reach[is] |= 8; /* recorded */
			if (state_tables && verbose)
			{	printf("state %d line %d is a loopstate\n", is, srcln[is]);
		}	}
		return;
	}
	reach[is] |= (4|16);	/* visited | onstack */
	for (z = trans[n][is]; z; z = z->nxt)
	{	t_id_lkup[z->t_id] = z;
#ifdef HAS_UNLESS
		int i, j;
#endif
		dfs_table(n, m, z->st, srcln, reach, lpstate);
#ifdef HAS_UNLESS
		for (i = 0; i < HAS_UNLESS; i++)
		{	j = trans[n][is]->escp[i];
			if (!j) break;
			dfs_table(n, m, j, srcln, reach, lpstate);
		}
#endif
	}
	reach[is] &= ~16; /* no longer on stack */
}
void
do_dfs(int n, int m, int is, short srcln[], uchar reach[], uchar lpstate[])
{	int i;
	dfs_table(n, m, is, srcln, reach, lpstate);
	for (i = 0; i < m; i++)
		reach[i] &= ~(4|8|16);
}
void
crack(int n, int j, Trans *z, short srcln[])
{	int i;

	if (!z) return;
	printf("	state %3d -(tr %3d)-> state %3d  ",
		j, z->forw, z->st);
	printf("[id %3d tp %3d", z->t_id, z->tpe[0]);
	if (z->tpe[1]) printf(",%d", z->tpe[1]);
#ifdef HAS_UNLESS
	if (z->e_trans)
		printf(" org %3d", z->e_trans);
	else if (state_tables >= 2)
	for (i = 0; i < HAS_UNLESS; i++)
	{	if (!z->escp[i]) break;
		printf(" esc %d", z->escp[i]);
	}
#endif
	printf("]");
	printf(" [%s%s%s%s%s] %s:%d => ",
		z->atom&6?"A":z->atom&32?"D":"-",
		accpstate[n][j]?"a" :"-",
		stopstate[n][j]?"e" : "-",
		progstate[n][j]?"p" : "-",
		z->atom & 8 ?"L":"G",
		PanSource, srcln[j]);
	for (i = 0; z->tp[i]; i++)
		if (z->tp[i] == '\n')
			printf("\\n");
		else
			putchar(z->tp[i]);
	if (verbose && z->qu[0])
	{	printf("\t[");
		for (i = 0; i < 6; i++)
			if (z->qu[i])
				printf("(%d,%d)",
				z->qu[i], z->ty[i]);
		printf("]");
	}
	printf("\n");
	fflush(stdout);
}
/* spin -a m.pml; cc -o pan pan.c; ./pan -D | dot -Tps > foo.ps; ps2pdf foo.ps */
void
dot_crack(int n, int j, Trans *z)
{	int i;

	if (!z) return;
	printf("	S%d -> S%d  [color=black", j, z->st);

	if (z->atom&6) printf(",style=dashed");
	else if (z->atom&32) printf(",style=dotted");
	else if (z->atom&8) printf(",style=solid");
	else printf(",style=bold");

	printf(",label=\"");
	for (i = 0; z->tp[i]; i++)
	{	if (z->tp[i] == '\\'
		&&  z->tp[i+1] == 'n')
		{	i++; printf(" ");
		} else
		{	putchar(z->tp[i]);
	}	}
	printf("\"];\n");
	if (accpstate[n][j]) printf("  S%d [color=red,style=bold];\n", j);
	else if (progstate[n][j]) printf("  S%d [color=green,style=bold];\n", j);
	if (stopstate[n][j]) printf("  S%d [color=blue,style=bold,shape=box];\n", j);
}

#ifdef VAR_RANGES
#define BYTESIZE	32	/* 2^8 : 2^3 = 256:8 = 32 */

typedef struct Vr_Ptr {
	char	*nm;
	uchar	vals[BYTESIZE];
	struct Vr_Ptr *nxt;
} Vr_Ptr;
Vr_Ptr *ranges = (Vr_Ptr *) 0;

void
logval(char *s, int v)
{	Vr_Ptr *tmp;

	if (v<0 || v > 255) return;
	for (tmp = ranges; tmp; tmp = tmp->nxt)
		if (!strcmp(tmp->nm, s))
			goto found;
	tmp = (Vr_Ptr *) emalloc(sizeof(Vr_Ptr));
	tmp->nxt = ranges;
	ranges = tmp;
	tmp->nm = s;
found:
	tmp->vals[(v)/8] |= 1<<((v)%8);
}

void
dumpval(uchar X[], int range)
{	int w, x, i, j = -1;

	for (w = i = 0; w < range; w++)
	for (x = 0; x < 8; x++, i++)
	{
from:		if ((X[w] & (1<<x)))
		{	printf("%d", i);
			j = i;
			goto upto;
	}	}
	return;
	for (w = 0; w < range; w++)
	for (x = 0; x < 8; x++, i++)
	{
upto:		if (!(X[w] & (1<<x)))
		{	if (i-1 == j)
				printf(", ");
			else
				printf("-%d, ", i-1);
			goto from;
	}	}
	if (j >= 0 && j != 255)
		printf("-255");
}

void
dumpranges(void)
{	Vr_Ptr *tmp;
	printf("\nValues assigned within ");
	printf("interval [0..255]:\n");
	for (tmp = ranges; tmp; tmp = tmp->nxt)
	{	printf("\t%s\t: ", tmp->nm);
		dumpval(tmp->vals, BYTESIZE);
		printf("\n");
	}
}
#endif
