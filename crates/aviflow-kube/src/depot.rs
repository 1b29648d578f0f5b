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
use futures_util::stream::{BoxStream, try_unfold};
use futures_util::{Stream, StreamExt};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio_util::io::{ReaderStream, StreamReader, SyncIoBridge};

/// How long who hands a layer up may be silent.
const SILENT: Duration = Duration::from_secs(60);
/// What of the disk is left to the store, to logs and to code.
const RESERVE: u64 = 1 << 30;
/// What to do where it has no more room.
const FULL: &str = "; ask an administrator to enlarge the volume of the control plane (the chart's `storage.size`), or \
                    put large packages into the image";

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

    /// Says that a layer is not this object any more, so that it is made again.
    ///
    /// # Errors
    /// If that cannot be written.
    fn unset_layer(&self, hash: &str, sha256: &str) -> io::Result<()>;

    /// Bytes that may still be stored.
    ///
    /// # Errors
    /// If the disk does not say.
    fn free(&self) -> io::Result<u64>;
}

/// Whether a layer is there, and whole. One that is damaged is there no more: it is made again.
pub(crate) fn whole(objects: &dyn Objects, hash: &str) -> io::Result<bool> {
    let Some(sha256) = objects.layer(hash)? else { return Ok(false) };
    match objects.find(&sha256) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::InvalidData | ErrorKind::NotFound) => {
            objects.unset_layer(hash, &sha256).map(|()| false)
        }
        Err(e) => Err(e),
    }
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
                let (status, advice) = match e.kind() {
                    ErrorKind::InvalidData => (StatusCode::BAD_REQUEST, ""),
                    ErrorKind::TimedOut => (StatusCode::REQUEST_TIMEOUT, ""),
                    ErrorKind::StorageFull | ErrorKind::QuotaExceeded => (StatusCode::INSUFFICIENT_STORAGE, FULL),
                    _ => (StatusCode::INTERNAL_SERVER_ERROR, ""),
                };
                refuse(status, format!("the {what} cannot be read or stored: {e}{advice}"))
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
    let length = headers.get(header::CONTENT_LENGTH).and_then(|h| h.to_str().ok()?.parse::<u64>().ok());
    let Some(length) = length else {
        return refuse(StatusCode::LENGTH_REQUIRED, "the request does not say how large the layer is");
    };
    if length > LARGEST {
        return refuse(StatusCode::PAYLOAD_TOO_LARGE, format!("a layer has at most {} MB", LARGEST >> 20));
    }
    let mut from = SyncIoBridge::new(StreamReader::new(pieces(body.into_data_stream(), SILENT))).take(LARGEST);
    let store = move |objects: &dyn Objects| {
        // Before anything is written: a disk that is full stops the store too.
        room(length, objects.free()?)?;
        objects.put(&sha256, &mut from)?;
        objects.set_layer(&hash, &sha256)
    };
    depot.ask("layer", store).await.map(|()| StatusCode::CREATED)
}

/// Whether something of this size may be stored where so much is free.
fn room(length: u64, free: u64) -> io::Result<()> {
    if length.saturating_add(RESERVE) <= free {
        return Ok(());
    }
    let (has, kept) = (free >> 20, RESERVE >> 20);
    let why = format!("it takes {} MB, and the disk has {has} MB, of which {kept} MB are kept free", length >> 20);
    Err(io::Error::new(ErrorKind::StorageFull, why))
}

/// What comes of a body; fails where nothing comes for so long.
fn pieces<B: Send + 'static, E: std::fmt::Display + 'static>(
    body: impl Stream<Item = Result<B, E>> + Send + 'static,
    silent: Duration,
) -> BoxStream<'static, io::Result<B>> {
    let next = move |mut body: std::pin::Pin<Box<dyn Stream<Item = Result<B, E>> + Send>>| async move {
        match tokio::time::timeout(silent, body.next()).await {
            Ok(Some(Ok(piece))) => Ok(Some((piece, body))),
            Ok(Some(Err(e))) => Err(io::Error::new(ErrorKind::UnexpectedEof, e.to_string())),
            Ok(None) => Ok(None),
            Err(_) => Err(io::Error::new(ErrorKind::TimedOut, format!("nothing came for {} s", silent.as_secs()))),
        }
    };
    try_unfold(Box::pin(body) as std::pin::Pin<Box<_>>, next).boxed()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream::{iter, pending};

    #[tokio::test]
    async fn who_is_silent_is_not_waited_for() {
        let body = |then| iter([Ok::<_, String>("first")]).chain(then);
        let mut whole = pieces(body(iter([]).boxed()), Duration::from_secs(60));
        assert_eq!((whole.next().await.map(Result::ok), whole.next().await.is_none()), (Some(Some("first")), true));
        let mut silent = pieces(body(pending().boxed()), Duration::ZERO);
        assert!(silent.next().await.is_some_and(|piece| piece.is_ok()));
        let end = silent.next().await.expect("an end").expect_err("nothing comes");
        assert_eq!(end.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn a_layer_leaves_the_disk_its_reserve() {
        assert!(room(5, RESERVE + 5).is_ok());
        let full = room(7 << 20, RESERVE + (6 << 20)).expect_err("too little");
        assert_eq!(full.kind(), ErrorKind::StorageFull);
        assert_eq!(full.to_string(), "it takes 7 MB, and the disk has 1030 MB, of which 1024 MB are kept free");
    }

    /// A store with one layer, whose object has what the second says.
    struct One(Mutex<Option<String>>, Result<(), ErrorKind>);

    impl Objects for One {
        fn find(&self, _: &str) -> io::Result<PathBuf> {
            self.1.map(|()| PathBuf::new()).map_err(io::Error::from)
        }
        fn open(&self, _: &str) -> io::Result<File> {
            Err(ErrorKind::Unsupported.into())
        }
        fn put(&self, _: &str, _: &mut dyn Read) -> io::Result<()> {
            Err(ErrorKind::Unsupported.into())
        }
        fn layer(&self, _: &str) -> io::Result<Option<String>> {
            Ok(self.0.lock().expect("whole").clone())
        }
        fn set_layer(&self, _: &str, _: &str) -> io::Result<()> {
            Err(ErrorKind::Unsupported.into())
        }
        fn unset_layer(&self, _: &str, sha256: &str) -> io::Result<()> {
            self.0.lock().expect("whole").take_if(|object| object == sha256);
            Ok(())
        }
        fn free(&self) -> io::Result<u64> {
            Ok(0)
        }
    }

    #[test]
    fn a_damaged_layer_is_not_there() {
        let one = |content| One(Mutex::new(Some("object".to_owned())), content);
        let good = one(Ok(()));
        assert!(whole(&good, "layer").expect("read"));
        assert!(good.layer("layer").expect("read").is_some());
        for damage in [ErrorKind::InvalidData, ErrorKind::NotFound] {
            let damaged = one(Err(damage));
            assert!(!whole(&damaged, "layer").expect("read"));
            assert_eq!(damaged.layer("layer").expect("read"), None, "nobody is given it any more");
        }
        let unread = one(Err(ErrorKind::PermissionDenied));
        assert!(whole(&unread, "layer").is_err());
        assert!(unread.layer("layer").expect("read").is_some(), "it may be whole");
    }
}
