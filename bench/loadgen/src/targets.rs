//! The streams of a run: their targets, and creating them in one durability class.
//!
//! The creates are pipelined, because with a slow disk each one alone would wait for its own sync.
//! A server that grants another class than the one asked for is an error: the figures would be
//! filed under the wrong name.

use std::net::SocketAddr;

use crate::http::Client;

pub const CONTENT_TYPE: &str = "application/octet-stream";
/// Creates under way at a time.
const PIPELINE: usize = 64;

pub fn targets(prefix: &str, streams: usize) -> Vec<String> {
    (0..streams)
        .map(|stream| format!("/v1/stream/{prefix}/{stream}"))
        .collect()
}

/// Creates all `targets`; an empty `durability` leaves the class to the server.
pub fn create(server: SocketAddr, targets: &[String], durability: &str) -> Result<(), String> {
    let mut client = Client::connect(server).map_err(|error| format!("cannot connect: {error}"))?;
    let class_line = match durability {
        "" => String::new(),
        class => format!("Stream-Durability: {class}\r\n"),
    };
    for part in targets.chunks(PIPELINE) {
        let requests: String = part
            .iter()
            .map(|target| {
                format!(
                    "PUT {target} HTTP/1.1\r\nHost: {server}\r\nContent-Type: {CONTENT_TYPE}\r\n{class_line}Content-Length: 0\r\n\r\n"
                )
            })
            .collect();
        client.send_raw(requests.as_bytes())?;
        for target in part {
            let head = client.receive(|_| {})?;
            if head.status != 201 {
                return Err(format!("PUT {target} answered {}", head.status));
            }
            if !durability.is_empty() && head.durability.as_deref() != Some(durability) {
                return Err(format!(
                    "PUT {target} asked for {durability} and was granted {:?}",
                    head.durability
                ));
            }
        }
    }
    Ok(())
}
