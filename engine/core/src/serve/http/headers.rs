//! The headers the engine reads: one table, and the look-up of a name in it.
//!
//! Where it sits: below `serve/http`, which keeps one slot per [`Known`] header in each head.
//!
//! Invariants: names match whatever their case; a header that steers storage (`Stream-*`,
//! `Producer-*`) or framing never has two values.

macro_rules! repeat_rule {
    (once $name:literal) => {
        Some(concat!("repeated header ", $name))
    };
    (list $name:literal) => {
        None
    };
}

/// One line per header: its slot, its lower-case name, and whether a second line is refused
/// (`once`) or legal (`list`).
macro_rules! known_headers {
    ($($slot:ident $name:literal $rule:ident,)+) => {
        /// Headers the engine reads, each with a fixed slot in [`Head`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u8)]
        pub enum Known { $($slot),+ }

        impl Known {
            pub const ALL: &'static [Known] = &[$(Known::$slot),+];
            const NAMES: &'static [&'static str] = &[$($name),+];
            pub(super) const REPEATED: &'static [Option<&'static str>] = &[$(repeat_rule!($rule $name)),+];
        }
    };
}

known_headers! {
    Host "host" once,
    Connection "connection" list,
    ContentLength "content-length" once,
    TransferEncoding "transfer-encoding" once,
    Expect "expect" once,
    ContentType "content-type" once,
    ContentEncoding "content-encoding" list,
    AcceptEncoding "accept-encoding" list,
    Authorization "authorization" once,
    Origin "origin" once,
    IfMatch "if-match" once,
    IfNoneMatch "if-none-match" list,
    LastEventId "last-event-id" once,
    XForwardedHost "x-forwarded-host" list,
    XForwardedProto "x-forwarded-proto" list,
    StreamSeq "stream-seq" once,
    StreamTtl "stream-ttl" once,
    StreamExpiresAt "stream-expires-at" once,
    StreamClosed "stream-closed" once,
    StreamDurability "stream-durability" once,
    StreamForkedFrom "stream-forked-from" once,
    StreamForkOffset "stream-fork-offset" once,
    StreamForkSubOffset "stream-fork-sub-offset" once,
    ProducerId "producer-id" once,
    ProducerEpoch "producer-epoch" once,
    ProducerSeq "producer-seq" once,
    MillstreamTiming "millstream-timing" once,
    MillstreamBodyCrc32 "millstream-body-crc32" once,
}

/// Case-insensitive compare of a header name with a lower-case literal. Setting bit 0x20 is exact
/// here: the only foreign byte it could let through is CR for `-`, which no header name contains.
#[inline]
fn same<const N: usize>(name: &[u8], lower: &[u8; N]) -> bool {
    let Ok(name) = <&[u8; N]>::try_from(name) else {
        return false;
    };
    let mut difference = 0;
    for index in 0..N {
        difference |= (name[index] | 0x20) ^ lower[index];
    }
    difference == 0
}

impl Known {
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize]
    }

    /// The length decides between one and five candidates.
    #[inline]
    pub(super) fn of(name: &[u8]) -> Option<Self> {
        let found = match name.len() {
            4 if same(name, b"host") => Self::Host,
            6 if same(name, b"origin") => Self::Origin,
            6 if same(name, b"expect") => Self::Expect,
            8 if same(name, b"if-match") => Self::IfMatch,
            10 if same(name, b"connection") => Self::Connection,
            10 if same(name, b"stream-seq") => Self::StreamSeq,
            10 if same(name, b"stream-ttl") => Self::StreamTtl,
            11 if same(name, b"producer-id") => Self::ProducerId,
            12 if same(name, b"content-type") => Self::ContentType,
            12 if same(name, b"producer-seq") => Self::ProducerSeq,
            13 if same(name, b"stream-closed") => Self::StreamClosed,
            13 if same(name, b"if-none-match") => Self::IfNoneMatch,
            13 if same(name, b"authorization") => Self::Authorization,
            13 if same(name, b"last-event-id") => Self::LastEventId,
            14 if same(name, b"content-length") => Self::ContentLength,
            14 if same(name, b"producer-epoch") => Self::ProducerEpoch,
            15 if same(name, b"accept-encoding") => Self::AcceptEncoding,
            16 if same(name, b"x-forwarded-host") => Self::XForwardedHost,
            16 if same(name, b"content-encoding") => Self::ContentEncoding,
            17 if same(name, b"transfer-encoding") => Self::TransferEncoding,
            17 if same(name, b"x-forwarded-proto") => Self::XForwardedProto,
            17 if same(name, b"stream-expires-at") => Self::StreamExpiresAt,
            17 if same(name, b"stream-durability") => Self::StreamDurability,
            17 if same(name, b"millstream-timing") => Self::MillstreamTiming,
            18 if same(name, b"stream-forked-from") => Self::StreamForkedFrom,
            18 if same(name, b"stream-fork-offset") => Self::StreamForkOffset,
            21 if same(name, b"millstream-body-crc32") => Self::MillstreamBodyCrc32,
            22 if same(name, b"stream-fork-sub-offset") => Self::StreamForkSubOffset,
            _ => return None,
        };
        Some(found)
    }
}
