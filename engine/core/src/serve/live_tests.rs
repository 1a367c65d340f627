//! A reader that comes to wait at the moment in which its stream ends, without a race: the steps one by one.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use super::*;
use crate::config::Config;
use crate::io::Doors;
use crate::io::tests::TestDirectory;
use crate::limits::HEAD_MAX_BYTES;
use crate::serve::http::{Parsed, parse_head};
use crate::serve::listener::Listener;
use crate::serve::pipeline::pool::Pipeline;
use crate::shard::engine::Engine;

#[test]
fn a_long_poll_that_meets_a_committed_delete_does_not_wait() {
    let directory = TestDirectory::new();
    let config = Config {
        listen: false,
        reactors: 1,
        ..Config::default()
    };
    let doors = Doors::real(directory.path()).expect("doors");
    let opened = Engine::open(config, doors, &mut |_| {});
    let engine = opened.expect("opens").engine;
    let committing = Arc::clone(&engine);
    let thread = std::thread::spawn(move || committing.shard.run_commit_thread());
    let listener = Arc::new(Listener::bind("127.0.0.1", 0).expect("bound"));
    let pipeline = Arc::new(Pipeline::new(Arc::clone(&engine)));
    let reactor = Reactor::new(0, Arc::clone(&engine), listener, pipeline, None);
    let mut reactor = reactor.expect("a reactor");

    let created = engine.local_create("short", "text/plain", None);
    assert!(created.expect("created"));
    let stream = engine.find("short").ok().flatten().expect("found");
    assert!(engine.local_delete("short").expect("deleted, and synced"));

    let (socket, _client) = UnixStream::pair().expect("sockets");
    let mut conn = Conn::new(OwnedFd::from(socket), 1);
    let request = b"GET /v1/stream/short?offset=now&live=long-poll HTTP/1.1\r\nHost: x\r\n\r\n";
    let Ok(Parsed::Complete(head)) = parse_head(request, &mut 0, HEAD_MAX_BYTES) else {
        panic!("a whole head");
    };
    let plan = ReadPlan {
        position: 0,
        gap: None,
        minted: false,
        now: true,
    };
    let polled = reactor.long_poll(&mut conn, &head, stream, plan, None);
    let refusal = polled.err().expect("an answer at once");
    assert_eq!(refusal.code, ErrorCode::StreamNotFound);
    assert!(matches!(conn.phase, Phase::Request));
    assert_eq!(engine.metrics.long_polls.get(), 0);
    engine.shard.stop_threads();
    thread.join().expect("commit thread");
}
