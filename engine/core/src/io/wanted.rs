//! Threads that must not wait for the disk, and what they did not have at hand.
//!
//! A reactor serves everybody, so it never waits for a disk: where a look would (bytes that are not in the page cache, a
//! file that is not open, a stream that is not in memory), it fails with `WouldBlock` and notes here what it wanted. The
//! reactor then lets that one request wait, a thread that may wait fetches what was noted, and the request is looked at
//! again from its beginning. Everybody else (workers, maintenance, tools, simulation) waits where it stands, as ever.
//!
//! Invariants
//! - `I-WAIT-1` A thread that said [`never_wait`] waits for no read, but for one that was fetched for it just now and is
//!   gone again already: else memory that is too small for what is read could keep it from getting on for ever.
//! - `I-WAIT-2` What failed for the thread that fetched it fails for the one that wanted it, with the same error.

use std::cell::{Cell, RefCell};
use std::io;

/// Names one thing that can be fetched. Who wants the same while it is being fetched waits with the others; a name that
/// is used again too early only makes somebody look again.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Key {
    /// Bytes of an open file, by its descriptor.
    Bytes {
        file: i32,
        position: u64,
        len: usize,
    },
    File(String),
    /// A stream that is not in memory, by its path or by its number.
    Path(Box<str>),
    /// The same for one who only reads.
    PathToRead(Box<str>),
    Stream(u64),
    /// Where messages begin in a large append of a stream.
    Points {
        stream: u64,
        start: u64,
        end: u64,
    },
    /// Whether bytes of a stream are what they should be.
    Look {
        stream: u64,
        from: u64,
        to: u64,
        index: bool,
    },
}

/// Fetches what needs nothing but a file.
pub type Fetch = Box<dyn FnOnce() -> io::Result<()> + Send>;

pub struct Wanted {
    pub key: Key,
    pub fetch: Option<Fetch>,
}

/// What became of something that was fetched.
#[derive(Clone, Debug)]
pub enum Told {
    AtHand,
    /// There is no such stream, in the state of the catalog with this number.
    Absent(u64),
    Failed(Failure),
}

/// An error that can be told to several.
#[derive(Clone, Debug)]
pub struct Failure {
    code: Option<i32>,
    kind: io::ErrorKind,
    text: String,
}

impl From<&io::Error> for Failure {
    fn from(error: &io::Error) -> Failure {
        Failure {
            code: error.raw_os_error(),
            kind: error.kind(),
            text: error.to_string(),
        }
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> io::Error {
        match failure.code {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(failure.kind, failure.text),
        }
    }
}

thread_local! {
    static NEVER_WAITS: Cell<bool> = const { Cell::new(false) };
    static NOTED: RefCell<Option<Wanted>> = const { RefCell::new(None) };
    /// Every request asks; that costs no more than this.
    static IS_NOTED: Cell<bool> = const { Cell::new(false) };
    static TOLD: RefCell<Vec<(Key, Told)>> = const { RefCell::new(Vec::new()) };
}

/// From here on this thread notes what it would have to wait for.
pub fn never_wait() {
    NEVER_WAITS.set(true);
}

/// Where a read that fails would break more than this look, it waits whoever asks.
pub fn waiting<T>(work: impl FnOnce() -> T) -> T {
    let before = NEVER_WAITS.replace(false);
    let done = work();
    NEVER_WAITS.set(before);
    done
}

pub fn may_wait() -> bool {
    !NEVER_WAITS.get()
}

/// For a thread that must not wait: what it was told about `key`. `None`: nothing, and so it is noted; the caller fails
/// with [`would_block`].
pub fn want(key: Key, fetch: impl FnOnce() -> Option<Fetch>) -> Option<Told> {
    let told = TOLD.with_borrow(|all| {
        let mut newest_first = all.iter().rev();
        let found = newest_first.find(|(about, _)| *about == key);
        found.map(|(_, told)| told.clone())
    });
    if told.is_none() {
        note(key, fetch());
    }
    told
}

/// Notes what is to be fetched, whatever was told before.
pub fn note(key: Key, fetch: Option<Fetch>) {
    NOTED.set(Some(Wanted { key, fetch }));
    IS_NOTED.set(true);
}

pub fn would_block() -> io::Error {
    io::Error::new(
        io::ErrorKind::WouldBlock,
        "this is being fetched from the disk",
    )
}

pub fn is_noted() -> bool {
    IS_NOTED.get()
}

/// What was noted last, for the first time since the last call.
pub fn take_noted() -> Option<Wanted> {
    if IS_NOTED.replace(false) {
        NOTED.take()
    } else {
        None
    }
}

/// What the looks that follow are told.
pub fn tell(told: Vec<(Key, Told)>) {
    TOLD.set(told);
}

/// What they were told last that leaves no trace in memory: a request that needs several such answers has to keep them
/// from one look to the next.
pub fn take_absent() -> Vec<(Key, Told)> {
    let mut told = TOLD.take();
    told.retain(|(_, told)| matches!(told, Told::Absent(_)));
    told
}
