//! The server's parts, and how it is served.

use crate::access::Identities;
use crate::auth::Token;
use crate::body::{Body, CatalogueEntry};
use crate::error::Failure;
use crate::jobs;
use crate::notified::Outcomes;
use crate::routes;
use crate::submit::{Applied, NotTaken, submit_applied};
use crate::view::Names;
use aviflow_api::file::Defaults;
use aviflow_core::lifecycle::Moment;
use aviflow_core::model::{Job, JobId, JobKey};
use aviflow_core::time::Time;
use aviflow_engine::driver::{Handle, View};
use aviflow_engine::ports::JobRecord;
use aviflow_metrics::board::Board;
use aviflow_store::{FileTelemetry, Objects, Reader};
use aviflow_tls::{Connection, Listener};
use axum::Router;
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

/// Bytes of one uploaded object, where the configuration does not say.
const MAX_UPLOAD: u64 = 100 << 20;

/// Uploads and archives that run at once; more wait for their turn.
const TRANSFERS: usize = 12;

/// How long requests that are being answered may hold up the end.
const LAST_ANSWERS: Duration = Duration::from_secs(10);

/// What the server is made of.
pub struct Parts {
    /// The engine.
    pub engine: Handle,
    /// The store, read beside its writer.
    pub reader: Arc<dyn Reader>,
    /// Code archives and locks.
    pub objects: Arc<Objects>,
    /// Logs and series.
    pub telemetry: Arc<FileTelemetry>,
    /// What GPUs report of themselves.
    pub gpus: Arc<Board>,
    /// This machine, or the cluster.
    pub body: Arc<dyn Body>,
    /// Environments that may be named.
    pub environments: Vec<CatalogueEntry>,
    /// What a document need not say.
    pub defaults: Defaults,
    /// How notifications ended.
    pub notified: Arc<Outcomes>,
    /// Whose holder may everything.
    pub token: Token,
    /// Who others are and what they may, where somebody knows it.
    pub identities: Option<Arc<dyn Identities>>,
    /// What the server says of itself.
    pub info: Info,
    /// Limits, and who may reach it.
    pub config: ServerConfig,
}

/// What the server says of itself.
#[derive(Clone, Debug)]
pub struct Info {
    /// The program's version.
    pub version: String,
    /// Where its state lives.
    pub home: String,
    /// When it started, in milliseconds since the Unix epoch.
    pub started: i64,
}

/// Limits, and who may reach the server.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Whether other machines may reach it.
    pub allow_remote: bool,
    /// Names under which it may be asked, beside those of this machine's loopback; any name if
    /// `allow_remote` is set and this is empty.
    pub hosts: Vec<String>,
    /// Bytes of one uploaded object, unless the client asks for more explicitly.
    pub max_upload: u64,
}

impl Default for ServerConfig {
    fn default() -> ServerConfig {
        ServerConfig { allow_remote: false, hosts: Vec::new(), max_upload: MAX_UPLOAD }
    }
}

/// Why the server could not be served.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// Other machines would reach it.
    #[error(
        "{0} can be reached by other machines, and whoever has the token can run commands here; \
         listen on 127.0.0.1, or allow it with `allowRemote: true` in the server's configuration"
    )]
    Remote(SocketAddr),
    /// The listener failed.
    #[error("the control plane cannot listen: {0}; see whether another one runs on this port")]
    Io(#[from] std::io::Error),
}

/// What every handler holds.
pub(crate) struct App {
    pub(crate) parts: Parts,
    /// Set once: streams end, and no new request is taken.
    pub(crate) stopping: watch::Sender<bool>,
    pub(crate) changes: crate::changes::Hub,
    pub(crate) channels: crate::channels::Channels,
    /// Uploads and archives that run at once.
    transfers: Arc<Semaphore>,
}

impl App {
    /// Reads the engine's state. Blocks for at most a turn.
    pub(crate) fn view<T: Send + 'static>(
        &self,
        read: impl FnOnce(&View<'_>) -> T + Send + 'static,
    ) -> Result<T, Failure> {
        Ok(self.parts.engine.read(read)?)
    }

    /// Names of all nodes, for sentences about them.
    pub(crate) fn names(&self) -> Result<Names, Failure> {
        self.view(|view| Names::of(view.snapshot))
    }

    /// Waits until another transfer may begin. Each holds a thread for as long as its
    /// client takes, and some must be left for everything else.
    pub(crate) async fn transfer(&self) -> Option<OwnedSemaphorePermit> {
        // Never closed, so a permit always comes.
        self.transfers.clone().acquire_owned().await.ok()
    }

    /// Waits until the server is being stopped.
    pub(crate) async fn stopped(&self) {
        // The sender lives as long as the app, so waiting cannot fail.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }
}

/// Runs what may wait for the disk or the engine where it holds up no other request.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(e) => Err(Failure::internal(format!("a request could not be carried out: {e}"))),
    }
}

/// The control plane's face to its users.
#[derive(Clone)]
pub struct Server {
    pub(crate) app: Arc<App>,
}

/// Submits objects of a cluster, with the checks that every submission passes. Calls wait for the disk.
#[derive(Clone)]
pub struct Applies {
    app: Arc<App>,
}

impl Applies {
    /// Submits an object, or finds the job that an earlier try has made of it.
    ///
    /// # Errors
    /// With the reason and what to do.
    pub async fn submit(&self, applied: Applied) -> Result<(JobId, JobKey), NotTaken> {
        submit_applied(&self.app, applied).await.map_err(NotTaken::from)
    }

    /// A job that has ended, when it did, and its record.
    #[must_use]
    pub fn ended(&self, job: JobId) -> Option<(Job, Option<Time>, JobRecord)> {
        let (kept, record) = self.app.parts.reader.job(job).ok()??;
        Some((kept.job, kept.ended, record))
    }

    /// A job's timeline after a row of it, oldest first, each entry with its row and in words; empty where it cannot
    /// be read.
    #[must_use]
    pub fn timeline(&self, job: JobId, after: u64) -> Vec<(u64, Moment, String)> {
        jobs::told(&self.app, job, after).unwrap_or_default()
    }
}

impl Server {
    /// A server of these parts; nothing listens yet.
    #[must_use]
    pub fn new(parts: Parts) -> Server {
        let (stopping, _) = watch::channel(false);
        let (changes, channels) = (crate::changes::Hub::default(), crate::channels::Channels::default());
        let transfers = Arc::new(Semaphore::new(TRANSFERS));
        Server { app: Arc::new(App { parts, stopping, changes, channels, transfers }) }
    }

    /// What submits objects of a cluster, for the body that finds them.
    #[must_use]
    pub fn applies(&self) -> Applies {
        Applies { app: self.app.clone() }
    }

    /// The routes.
    pub fn router(&self) -> Router {
        routes::router(&self.app)
    }

    /// Serves until `shutdown` completes or somebody asks for the end. Open
    /// streams are ended, other requests are answered first.
    ///
    /// # Errors
    /// If other machines could reach the listener and that was not allowed, or if it fails.
    pub async fn serve(
        self,
        listener: impl Into<Listener>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), ServerError> {
        let listener = listener.into();
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() && !self.app.parts.config.allow_remote {
            return Err(ServerError::Remote(address));
        }
        let router = self.router().into_make_service_with_connect_info::<Connection>();
        let app = self.app.clone();
        let end = async move {
            tokio::select! {
                () = shutdown => {}
                () = app.stopped() => {}
            }
            app.stopping.send_replace(true);
        };
        let late = async {
            self.app.stopped().await;
            tokio::time::sleep(LAST_ANSWERS).await;
        };
        tokio::select! {
            served = axum::serve(listener, router).with_graceful_shutdown(end).into_future() => Ok(served?),
            // A client that sends half a request must not keep the control plane from ending.
            () = late => Ok(()),
        }
    }
}
