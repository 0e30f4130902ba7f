"""What the papers say about their figures, number by number, and where.

Only what their text and tables state: numbers that stand in a plot alone are not guessed from it.

* ESD: Li et al., "Embedding Samples Dispatching for Recommendation Model Training in Edge Environments";
  its journal version (Journal of Computer Research and Development, DOI 10.7544/issn1000-1239.202550128)
  counts figures one higher and adds a few numbers.
* Herald: Zeng et al., "Accelerating Neural Recommendation Training with Embedding Scheduling", NSDI '24.
* HypeReca: He et al., "HypeReca: Distributed Heterogeneous In-Memory Embedding Database for Training
  Recommender Models", USENIX ATC '25.
* FIITED: Luo et al., "FIITED: Fine-Grained Embedding Dimension Optimization During Training for Recommender
  Systems".
"""

from __future__ import annotations

from dataclasses import dataclass

ESD_TRANSFER_SHARE = 0.90  # of the training time, Criteo Kaggle, default setting (§1, §2.3)

HERALD_WORKERS = 8
HERALD_CACHE = 0.10
HERALD_TRANSFER_SHARE = 0.63  # of the end-to-end time, the highest of its workloads, W1 (§2.2, §6.3)
HERALD_BUDGET_MS = 18.2

WARMUP = 10  # iterations left out by both

SOLVER_MS = {  # ESD, table 2: batch per worker: (serial on a CPU, CUDA on an RTX 4090)
    32: (9, 21),
    64: (62, 28),
    128: (528, 82),
    256: (3_360, 186),
    512: (50_976, 811),
    1024: (134_986, 1_385),
}

BREAKDOWN = {  # Herald, table 2: transmissions saved, W1: (pull, push, overall)
    "LAIA alone": (0.54, 0.17, 0.35),
    "on-demand alone": (0.0, 0.13, 0.07),
    "Herald": (0.54, 0.63, 0.59),
}

FIITED_SIZES = {  # table 1: GB of values, and the size of rows (§IV-A)
    "criteo": (4.02, 32),
    "criteo-tb": (11.71, 64),
    "avazu": (1.13, 32),
    "movielens": (0.03, 128),
}


@dataclass(frozen=True)
class Stated:
    """One statement of a paper."""

    text: str
    place: str


ESD = {
    "speed-up": Stated("ESD is 1.03-1.74x as fast as LAIA (S1-S3, α = 0, 0.5, 1)", "§6.2"),
    "reduction:1": Stated("ESD(1) lowers the cost by up to 36.76 %", "§6.2"),
    "reduction:0.5": Stated("ESD(0.5) lowers the cost by 10.81 %", "§6.2"),
    "reduction:0": Stated("ESD(0) lowers the cost by 7.03 %", "§6.2"),
    "baselines": Stated("HET and FAE are behind LAIA on every workload", "§6.2"),
    "hits": Stated("ESD's hit ratio is not higher than LAIA's", "§6.3"),
    "fast share LAIA": Stated(
        "with LAIA fewer operations are on the 5 Gbps links than on the 0.5 Gbps ones", "§6.3"
    ),
    "fast share ESD": Stated("ESD raises the share of the 5 Gbps links on every workload", "§6.3"),
    "evict share": Stated("miss pulls and update pushes are > 90 %, evict pushes < 10 %", "§6.3"),
    "alpha": Stated("a larger α lowers the cost more, and takes more of the GPU", "§6.4"),
    "alpha:0": Stated("even α = 0 is cheaper than LAIA", "§6.4"),
    "reduction m=256": Stated("m = 256: up to 40.84 % lower", "§6.4"),
    "S1 m=256": Stated("S1, m = 256: 29.51 % (α = 1), 12.96 % (α = 0.5)", "journal version §5.4"),
    "gpu": Stated(
        "GPU use of the decision: 74.89 % (S1, m = 128, α = 1), 17.59-19.72 % (m = 128, α = 0.5)", "§6.4"
    ),
    "batch best": Stated("S2: the speed-up grows from m = 64 to 256, up to 1.54x", "§6.5"),
    "batch 512": Stated(
        "S2, m = 512: a larger reduction but a speed-up of 1.23x only, for the decision takes longer", "§6.5"
    ),
    "cache": Stated("S2: the speed-up does not vary a lot between 4 % and 10 % of the rows cached", "§6.5"),
    "dim speed-up": Stated("S2: the speed-up grows with the dimension, up to 1.59x", "§6.5"),
    "dim cost": Stated("S2: the cost reduction does not depend on the dimension", "§6.5"),
    "four mixed speed-up": Stated("2 fast + 2 slow: 1.07-1.31x", "§6.5"),
    "four mixed cost": Stated("2 fast + 2 slow: 6.06-42.15 % lower", "§6.5"),
    "four equal speed-up": Stated("4 fast: 1.03-1.23x", "§6.5"),
    "four equal cost": Stated("4 fast: 0.33-29.11 % lower", "§6.5"),
}

HERALD = {
    "growth": Stated("distinct rows of an iteration grow 2.7-4.0x from m = 64 to 256", "§2.2"),
    "infrequency": Stated("degree of infrequency > 99 % at every cluster size", "§3.2"),
    "infrequency tables": Stated("some tables are always > 99 %, others go down to < 1 %", "§4.3"),
    "transmissions": Stated("48-89 % fewer transmissions", "§6.2.1"),
    "pulls": Stated("43-88 % fewer pulls", "§6.2.1"),
    "pushes": Stated("51-90 % fewer pushes", "§6.2.1"),
    "overhead": Stated("7.7 ms a batch on 16 threads", "§6.2.2"),
    "overhead parts": Stated("scoring 3.2 ms (42 %), allocation 0.6 ms (8 %)", "§6.2.2"),
    "adaptive": Stated("at least 4 of 26 tables fit 18.2 ms, < 1.11x the transmissions", "§6.2.2"),
    "cache": Stated("W1: 1.97-2.15x as fast as HET with 4-10 % of the rows cached", "§6.3"),
    "brute force": Stated("scheduling quality 0.45-0.57 against brute force, m = 1", "appendix C"),
    "brute force time": Stated("Herald < 0.7 ms; brute force seconds from 10 workers on", "appendix C"),
}  # fmt: skip

HYPERECA = {
    "frequent criteo": Stated("Criteo Kaggle: 2.2 % of the items are in more than 95 of 100 batches", "§2.4"),
    "accesses criteo": Stated("Criteo Kaggle: more than 90 % of the accesses are to those", "§2.4"),
    "frequent taobao": Stated("Taobao: 0.6 % of the items are in more than 95 of 100 batches", "§2.4"),
    "accesses taobao": Stated("Taobao: 13 % of the items take about 86 % of the accesses", "§2.4"),
    "rho criteo": Stated("Criteo Kaggle: 32,265 items take 92 % of the accesses", "§5.3"),
    "rho taobao": Stated("Taobao: 227,058 items take 86 % of the accesses", "§5.3"),
    "lasting": Stated("what a set chosen in the first 100 batches covers stays the same for days", "§6.4"),
    "rho 64k": Stated("64k items take 73.9 % on Taobao, around 96 % on Criteo and Terabyte", "§6.5"),
}  # fmt: skip

FIITED = {
    "ranks": Stated("the ranks that hold a table's information vary a lot between tables", "§II-B"),
    "hot rows": Stated("a tiny fraction of a table's rows has far more accesses and gradients", "§II-B"),
    "columns": Stated("some dimensions remain important during the entire training time", "§II-B"),
    "better": Stated("FIITED is more accurate than AdaEmbed and mixed dimensions at every ratio", "§IV-B"),
    "similar": Stated("manual and dynamic ratios yield similar results", "§IV-B"),
    "mixed": Stated("mixed dimensions cannot reach 99 %", "figure 8"),
    "speed": Stated("training: 1.41x as fast as unpruned with K = 2, 1.13x with K = 4", "§IV-C"),
    "chunks cost": Stated("the time grows steadily with K; AdaEmbed (K = 1) is the fastest", "§IV-C"),
    "overhead": Stated("3 K / D: an address, a utility and a frequency a chunk; K / D in inference", "§IV-C"),
    "linear overhead": Stated("memory overhead grows about linearly with K", "§IV-C"),
    "same ratios": Stated("at 90 %, with 95 % at most a chunk, a = 0.5 and a = 1 are the same", "§IV-D"),
    "more chunks": Stated("operations by memory are those by chunk, divided by K", "§IV-D"),
}  # fmt: skip
