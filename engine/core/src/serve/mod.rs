//! Sockets and HTTP: the data plane's front, and the way to the control plane.
//!
//! Reading order: `server` (up and down), `listener` (socket), `reactor` (event loop), `connections` and `conn`,
//! `http` (parsing), `requests` (framing and order), `route` (what is asked), then `append`, `create`, `read`,
//! `live` (and `events`), `proxy`, `pipeline`; `respond` renders, `replies` holds back, `output` sends, `budget` counts,
//! `turns` lets others go first.

pub mod append;
pub mod budget;
pub mod conn;
pub mod connections;
pub mod create;
pub mod events;
pub mod http;
pub mod listener;
pub mod live;
pub mod output;
pub mod pipeline;
pub mod proxy;
pub mod reactor;
pub mod read;
pub mod replies;
pub mod requests;
pub mod respond;
pub mod route;
pub mod server;
pub mod sys;
pub mod time;
pub mod timing;
pub mod turns;
pub mod waits;
pub mod watchers;
pub mod wheel;
