//! Sockets and HTTP: the data plane's front, and the way to the control plane.
//!
//! Reading order: `listener` (socket), `reactor` (event loop), `conn` (one connection), `http` (parsing),
//! `route` (what is asked), then `append`, `create`, `read`, `live`, `proxy`; `respond` renders.

pub mod append;
pub mod conn;
pub mod create;
pub mod http;
pub mod listener;
pub mod live;
pub mod output;
pub mod proxy;
pub mod reactor;
pub mod read;
pub mod respond;
pub mod route;
pub mod server;
pub mod sys;
pub mod time;
pub mod wheel;
