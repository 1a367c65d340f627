//! The server's life without clients: open, drop, open again.

use crate::config::Config;
use crate::io::tests::TestDirectory;
use crate::serve::server::Server;

#[test]
fn a_dropped_server_leaves_no_thread_behind_its_lock() {
    let directory = TestDirectory::new();
    let config = || Config {
        data_dir: directory.path().display().to_string(),
        listen: false,
        ..Config::default()
    };
    for round in 0..3 {
        let server = Server::open(config(), &mut |_| {}).expect("opens again");
        server
            .engine
            .local_create(&format!("r/{round}"), "text/plain", None)
            .expect("created");
        assert!(
            Server::open(config(), &mut |_| {}).is_err(),
            "one server per directory"
        );
        assert_eq!(
            server
                .engine
                .list("r/", "", 10)
                .map(|listed| listed.streams.len())
                .unwrap_or(0),
            round + 1
        );
    }
}
