//! Where pods fetch code and layers, and where those that make a layer hand it up: a few HTTP routes, for pods alone.
//!
//! A pod proves who it is by the token that is bound to it, and gets what its own job refers to and nothing else. Who
//! makes a layer may store that layer and no other.

use crate::layer::LARGEST;
use crate::site::{self, PodRef, Pods};
use aviflow_link::Workers;
use aviflow_tls::Listener;
use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use futures_util::TryStreamExt;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::io::{ReaderStream, StreamReader, SyncIoBridge};

/// The header of a layer with the SHA-256 of its archive, by which who fetches it checks it.
pub const CONTENT: &str = "x-aviflow-sha256";

/// The object store, as pods need it. Its calls may block.
pub trait Objects: Send + Sync {
    /// The file of an object whose content was checked.
    ///
    /// # Errors
    /// If there is none, or it is damaged.
    fn find(&self, sha256: &str) -> io::Result<PathBuf>;

    /// Opens an object, whose reader checks it.
    ///
    /// # Errors
    /// If there is none.
    fn open(&self, sha256: &str) -> io::Result<File>;

    /// Stores what has a hash.
    ///
    /// # Errors
    /// If it has another, or cannot be read or written.
    fn put(&self, sha256: &str, from: &mut dyn Read) -> io::Result<()>;

    /// The object that a layer is, if it is there.
    ///
    /// # Errors
    /// If that cannot be read.
    fn layer(&self, hash: &str) -> io::Result<Option<String>>;

    /// Says which object a layer is.
    ///
    /// # Errors
    /// If that cannot be written.
    fn set_layer(&self, hash: &str, sha256: &str) -> io::Result<()>;
}

/// A pod that makes a layer.
#[derive(Clone, Debug)]
pub(crate) struct Build {
    pub(crate) pod: PodRef,
    /// The hash of the layer.
    pub(crate) layer: String,
    /// SHA-256 of the lock.
    pub(crate) lock: String,
    /// Whether it is done with: then it is being removed, gets nothing, and is taken up by nobody.
    pub(crate) over: bool,
}

/// Pods that make layers, by their uid, until they are gone.
pub(crate) type Builds = Arc<Mutex<BTreeMap<String, Build>>>;

fn held(builds: &Builds) -> MutexGuard<'_, BTreeMap<String, Build>> {
    // Whoever panicked left a whole map.
    builds.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on a pod may hand a layer up.
pub(crate) fn expect(builds: &Builds, build: Build) {
    held(builds).insert(build.pod.uid.clone(), build);
}

/// From now on no pod may hand this layer up. Gives those that could.
pub(crate) fn retire(builds: &Builds, layer: &str) -> Vec<PodRef> {
    let mut builds = held(builds);
    let of_layer = builds.values_mut().filter(|build| build.layer == layer);
    of_layer
        .map(|build| {
            build.over = true;
            build.pod.clone()
        })
        .collect()
}

/// Whether a pod is done with.
pub(crate) fn retired(builds: &Builds, uid: &str) -> bool {
    held(builds).get(uid).is_some_and(|build| build.over)
}

/// A pod is gone.
pub(crate) fn forget(builds: &Builds, uid: &str) {
    held(builds).remove(uid);
}

struct Depot {
    workers: Arc<Workers<Pods>>,
    objects: Arc<dyn Objects>,
    builds: Builds,
}

/// Why a pod gets nothing.
struct Refusal(StatusCode, String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, format!("{}\n", self.1)).into_response()
    }
}

fn refuse<T>(status: StatusCode, why: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal(status, why.into()))
}

/// Serves until the task is aborted.
pub(crate) async fn serve(workers: Arc<Workers<Pods>>, objects: Arc<dyn Objects>, builds: Builds, listener: Listener) {
    let router = Router::new()
        .route("/code/{sha256}", get(code))
        .route("/layer/{hash}", get(layer))
        .route("/lock/{sha256}", get(lock))
        .route("/layer/{hash}/{sha256}", put(hand_up))
        // That of the store counts.
        .layer(DefaultBodyLimit::disable())
        .with_state(Arc::new(Depot { workers, objects, builds }));
    // It ends with the listener alone.
    let _ = axum::serve(listener, router).await;
}

impl Depot {
    /// The pod that asks.
    async fn pod(&self, headers: &HeaderMap) -> Result<PodRef, Refusal> {
        let token = headers.get(header::AUTHORIZATION).and_then(|h| h.to_str().ok()?.strip_prefix("Bearer "));
        let pod = match token {
            Some(token) => site::review(&self.workers.site.client, token).await,
            None => None,
        };
        pod.map_or_else(|| refuse(StatusCode::UNAUTHORIZED, "the token is not one of a pod of this cluster"), Ok)
    }

    /// Refuses a pod whose worker does not refer to something.
    fn of_worker(&self, pod: &PodRef, refers: impl Fn(&site::Own) -> bool, what: &str) -> Result<(), Refusal> {
        let state = self.workers.lock();
        match state.workers.values().find(|w| w.own.pod.as_ref() == Some(pod)).map(|w| refers(&w.own)) {
            Some(true) => Ok(()),
            Some(false) => refuse(StatusCode::FORBIDDEN, format!("this is not the {what} of the pod's job")),
            // The pod may be faster than the answer to its creation: it asks again.
            None => refuse(StatusCode::NOT_FOUND, "the pod is not known yet"),
        }
    }

    /// The layer that a pod makes, with its lock.
    fn of_build(&self, pod: &PodRef) -> Result<(String, String), Refusal> {
        match held(&self.builds).get(&pod.uid) {
            Some(build) if build.over => refuse(StatusCode::FORBIDDEN, "the pod's layer is not wanted any more"),
            Some(build) if build.pod == *pod => Ok((build.layer.clone(), build.lock.clone())),
            _ => refuse(StatusCode::NOT_FOUND, "the pod is not known yet"),
        }
    }

    /// Asks the store, which may block.
    async fn ask<T: Send + 'static>(
        &self,
        what: &str,
        ask: impl FnOnce(&dyn Objects) -> io::Result<T> + Send + 'static,
    ) -> Result<T, Refusal> {
        let objects = self.objects.clone();
        match tokio::task::spawn_blocking(move || ask(objects.as_ref())).await {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(e)) if e.kind() == ErrorKind::NotFound => {
                refuse(StatusCode::GONE, format!("the {what} is not in the store any more; submit the job again"))
            }
            Ok(Err(e)) => {
                let status = match e.kind() {
                    ErrorKind::InvalidData => StatusCode::BAD_REQUEST,
                    _ => StatusCode::INTERNAL_SERVER_ERROR,
                };
                refuse(status, format!("the {what} cannot be read or stored: {e}"))
            }
            Err(_) => refuse(StatusCode::SERVICE_UNAVAILABLE, "the control plane is stopping"),
        }
    }
}

fn stream(file: File) -> Body {
    Body::from_stream(ReaderStream::new(tokio::fs::File::from_std(file)))
}

async fn code(
    State(depot): State<Arc<Depot>>,
    Path(sha256): Path<String>,
    headers: HeaderMap,
) -> Result<Body, Refusal> {
    let pod = depot.pod(&headers).await?;
    depot.of_worker(&pod, |own| own.code.as_deref() == Some(sha256.as_str()), "code")?;
    let wanted = sha256.clone();
    depot.ask("code snapshot", move |objects| File::open(objects.find(&wanted)?)).await.map(stream)
}

async fn layer(
    State(depot): State<Arc<Depot>>,
    Path(hash): Path<String>,
    headers: HeaderMap,
) -> Result<([(HeaderName, String); 1], Body), Refusal> {
    let pod = depot.pod(&headers).await?;
    depot.of_worker(&pod, |own| own.layer.as_deref() == Some(hash.as_str()), "layer")?;
    let open = move |objects: &dyn Objects| {
        let sha256 = objects.layer(&hash)?.ok_or(ErrorKind::NotFound)?;
        Ok((objects.open(&sha256)?, sha256))
    };
    let (file, sha256) = depot.ask("layer with the job's packages", open).await?;
    Ok(([(HeaderName::from_static(CONTENT), sha256)], stream(file)))
}

async fn lock(
    State(depot): State<Arc<Depot>>,
    Path(sha256): Path<String>,
    headers: HeaderMap,
) -> Result<Body, Refusal> {
    let pod = depot.pod(&headers).await?;
    if depot.of_build(&pod)?.1 != sha256 {
        return refuse(StatusCode::FORBIDDEN, "this is not the lock of the pod's layer");
    }
    depot.ask("lock", move |objects| File::open(objects.find(&sha256)?)).await.map(stream)
}

async fn hand_up(
    State(depot): State<Arc<Depot>>,
    Path((hash, sha256)): Path<(String, String)>,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, Refusal> {
    let pod = depot.pod(&headers).await?;
    if depot.of_build(&pod)?.0 != hash {
        return refuse(StatusCode::FORBIDDEN, "this is not the layer that the pod makes");
    }
    let pieces = body.into_data_stream().map_err(|e| io::Error::new(ErrorKind::UnexpectedEof, e.to_string()));
    let mut from = SyncIoBridge::new(StreamReader::new(pieces)).take(LARGEST);
    let store = move |objects: &dyn Objects| {
        objects.put(&sha256, &mut from)?;
        objects.set_layer(&hash, &sha256)
    };
    depot.ask("layer", store).await.map(|()| StatusCode::CREATED)
}
