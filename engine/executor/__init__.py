"""Where ranks run. An executor is one file with a class that follows base.Executor and one line in
base.EXECUTORS; what a rank does is rank.Rank, the same under every executor."""
