"""How contributions reach the other learners: `base` is the protocol."""

import os

# Worker processes of a data loader are forked from a process in which gRPC's threads run. gRPC's own fork handlers then
# abort one worker of eight ("Mutex::Fer with pending CondVar queueing"). Without them a worker, which makes no calls,
# is safe. gRPC reads this when it is imported.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
