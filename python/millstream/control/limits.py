"""Every bound of the control plane in one place.

Sits below all other modules of `control`. A bound is here if outside input or the number of streams could
otherwise make a queue, a body, a record or a loop grow without end.
"""

from __future__ import annotations

from typing import Final

# Requests and answers.
BODY_BYTES_MAX: Final = 1 << 20
LIST_LIMIT_DEFAULT: Final = 100
LIST_LIMIT_MAX: Final = 1000
# Calls that are worked on, those included whose clients have left: to leave does not end them.
CONCURRENT_CALLS_MAX: Final = 1024
# Values of a JSON body, which take far more time than its bytes. The largest call that is allowed is 10,000 acks (below)
# with three each: the object and its two fields.
JSON_VALUES_MAX: Final = 40_000
JSON_INTEGER_CHARS_MAX: Final = 40

# Calls that wait, by kind: for the end of a backup or verification, for a change of class (a checkpoint), for a listing
# or an entry of it to be made, for a turn to change subscriptions, for work to claim, for a large view of a subscription
# to be made, for the place of a backup to be looked at. Their sum stays below what one network thread forwards (256), so
# that short calls get through.
WAITING_CALLS_MAX: Final = 64
CLASS_CHANGES_MAX: Final = 32
LISTINGS_MAX: Final = 32
MEMBERSHIP_CALLS_MAX: Final = 64
CLAIMS_MAX: Final = 32
LARGE_VIEWS_MAX: Final = 16
BACKUP_PLACES_MAX: Final = 1
# Resolving the links of a path takes the square of its length; no system call takes a longer one.
BACKUP_PATH_BYTES_MAX: Final = 4096

# What one subscription may say about itself.
SUBSCRIPTIONS_MAX: Final = 10_000
# Links of all subscriptions together. A further link to a stream that others follow costs no memory of its own while
# nothing is outstanding; one with something outstanding does: about 150 bytes.
SUBSCRIPTION_LINKS_MAX: Final = 2_000_000
# What is kept for them: about this for each stream that is followed, by however many, and for each link that names its
# stream, and the name itself on top of each.
FOLLOWED_STREAM_BYTES: Final = 500
NAMED_LINK_BYTES: Final = 300
SUBSCRIPTION_LINK_BYTES_MAX: Final = 1 << 30
SUBSCRIPTION_ID_CHARS_MAX: Final = 256
PATH_CHARS_MAX: Final = 1024
PATTERN_SEGMENTS_MAX: Final = 64
DESCRIPTION_CHARS_MAX: Final = 4096
URL_CHARS_MAX: Final = 2048
WORKER_CHARS_MAX: Final = 256
STREAMS_PER_REQUEST_MAX: Final = 10_000
ACKS_PER_REQUEST_MAX: Final = 10_000
LEASE_TTL_MS_DEFAULT: Final = 30_000
LEASE_TTL_MS_MIN: Final = 1_000
LEASE_TTL_MS_MAX: Final = 600_000

# A view of a subscription lists at most this many streams, in so many bytes: it has to fit into one answer (8 MiB).
VIEW_STREAMS_MAX: Final = 20_000
VIEW_STREAMS_BYTES_MAX: Final = 6 << 20
# Those with more than this are large: they are made one after the other, this many streams at a time.
VIEW_STEP_STREAMS: Final = 500

# A wake lists at most this many streams; what is left over stays pending and makes the next wake.
WAKE_STREAMS_MAX: Final = 1000

# Sending: a webhook request, or a record on a wake stream.
RETRY_FIRST_MS: Final = 1_000
RETRY_MAX_MS: Final = 60_000
RETRY_JITTER: Final = 0.2
# First attempts, and retries, that have a turn at once; how long a turn is, and how many of each kind may go on after it.
DELIVERIES_MAX: Final = 256
RETRIES_MAX: Final = 64
TURN_S: Final = 1.0
ASIDE_MAX: Final = 128
DELIVERIES_PER_TARGET_MAX: Final = 32
DELIVERY_TIMEOUT_MS_MAX: Final = 30_000
CONNECT_TIMEOUT_S: Final = 5.0
RESOLVE_TIMEOUT_S: Final = 3.0
# Names that are looked up at once, each in a thread that goes on until the machine's resolver gives up: up to half a
# minute. So many of them are kept from names that nobody knows yet, twice as many from those that were slow.
LOOKUPS_MAX: Final = 64
LOOKUPS_KEPT: Final = 16
# A receiver's reply: all up to the end of its head, its body, and into how many parts it may fall (informational
# replies, pieces of the body); how much of it is looked at before others have their turn.
REPLY_HEAD_BYTES_MAX: Final = 32 << 10
REPLY_BODY_BYTES_MAX: Final = 64 << 10
REPLY_PARTS_MAX: Final = 256
REPLY_READ_BYTES: Final = 4 << 10
TOKEN_LIFETIME_MS: Final = 24 * 3_600_000

# The journal: a record stays below one read window; it is rewritten when it is large and mostly history.
JOURNAL_RECORD_BYTES_MAX: Final = 512 << 10
JOURNAL_LINKS_PER_EVENT: Final = 1000
JOURNAL_REWRITE_BYTES_MIN: Final = 4 << 20
JOURNAL_REWRITE_FACTOR: Final = 4
JOURNAL_BATCH_MAX: Final = 512

# The change feed: how long one take waits, and the shortest time between two takes that found something
# (a hot stream then costs at most 200 rounds per second, however many appends it gets).
FEED_TAKE_MS: Final = 50
FEED_IDLE_TAKE_MS: Final = 500
FEED_PACE_S: Final = 0.005
FEED_BATCH_MAX: Final = 2000
# Links that one round looks at, of streams that few follow and again of those that many do; how many few are; and how many
# streams may wait for their turn before no more are taken from the engine.
FEED_ROUND_LINKS: Final = 10_000
FEED_LIGHT_LINKS: Final = 100
FEED_WAITING_MAX: Final = 100_000
# How long a claim waits at most for changes to come through the feed: then it goes by what is known.
CLAIM_SETTLES_S: Final = 1.0
# Links that are looked at in one piece of work, behind which other calls have their turn: some 10 ms.
OBSERVED_LINKS_STEP: Final = 1000
# Streams that are forgotten in one piece of work, when nobody follows them any more.
SWEPT_STREAMS_STEP: Final = 5000
# Names and globs that are handed to the engine at once: it keeps its reader waiting so long.
WATCH_BATCH_MAX: Final = 2000
