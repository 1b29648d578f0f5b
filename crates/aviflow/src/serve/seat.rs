//! The one seat of several control planes: waiting for it, keeping it, giving it up.
//!
//! The Lease says who shall take the store; the store's term says who writes it (ADR 12). So who sits goes on while
//! the apiserver is away, and ends only when the Lease has another holder, or the store another term. Who waits
//! answers for its health alone, and touches neither store nor cluster nor home folder; it only reads what it needs to
//! answer within TLS.

use crate::error::{Failure, Result, While};
use crate::output::note;
use aviflow_core::model::Term;
use aviflow_engine::ports::StoreError;
use aviflow_kube::lease::{DURATION, LOOK, Lease, RENEW, Step};
use aviflow_store::Reader;
use aviflow_tls::Listener;
use aviflow_tls::listener::Speech;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// How long clients of one that waited may take to go, before it serves.
const LAST_ANSWERS: Duration = Duration::from_secs(1);

/// Somebody asks for the end.
pub struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    /// From now on signals are asked for here, and end the process no more.
    pub fn listen() -> Result<Stop> {
        let caught = |kind| signal(kind).or_fail(|| "signals cannot be caught".to_owned());
        Ok(Stop { terminate: caught(SignalKind::terminate())?, interrupt: caught(SignalKind::interrupt())? })
    }

    /// Completes when somebody does, or did.
    pub async fn asked(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// The store as this control plane took it.
type Taken = (Arc<dyn Reader>, Term);

/// A lease that is held, and renewed by a task of its own.
pub struct Seat {
    standby: Standby,
    says: watch::Sender<String>,
    taken: Arc<OnceLock<Taken>>,
    lost: Option<oneshot::Receiver<Failure>>,
    give_up: oneshot::Sender<()>,
    keeper: JoinHandle<()>,
}

impl Seat {
    /// Waits until the lease is this one's, and answers meanwhile; none if somebody asks for the end before.
    pub async fn wait(
        mut lease: Lease,
        listener: (&TcpListener, Option<Speech>),
        stop: &mut Stop,
    ) -> Result<Option<Seat>> {
        let (says, why) = watch::channel("looks who holds the lease".to_owned());
        let standby = Standby::start(listener, why)?;
        let mut waits_for = None;
        let ended = loop {
            let step = tokio::select! {
                step = lease.step() => step,
                () = stop.asked() => break Ok(()),
            };
            let pause = match step {
                Step::Held => {
                    says.send_replace(format!("holds the lease {} and takes the store", lease.shown()));
                    note(&format!("it holds the lease {} as {}", lease.shown(), lease.me()));
                    return Ok(Some(Seat::keep(lease, standby, says)));
                }
                Step::Waits { holder, again } => {
                    says.send_replace(format!("waits: {holder} holds the lease {}", lease.shown()));
                    if waits_for.as_ref() != Some(&holder) {
                        note(&format!(
                            "another control plane, {holder}, holds the lease {}; this one waits",
                            lease.shown()
                        ));
                        waits_for = Some(holder);
                    }
                    again
                }
                Step::Again => Duration::ZERO,
                Step::Away(reason) => {
                    says.send_replace(format!("cannot ask for the lease {}: {reason}", lease.shown()));
                    LOOK
                }
                Step::Refused(reason) => break Err(refused(&lease, &reason)),
                Step::Lost { holder } => break Err(lost(&lease, &holder)),
            };
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.asked() => break Ok(()),
            }
        };
        // A write may have been under way.
        lease.release().await;
        standby.end().await;
        ended.map(|()| None)
    }

    fn keep(lease: Lease, standby: Standby, says: watch::Sender<String>) -> Seat {
        let (give_up, given_up) = oneshot::channel();
        let (loses, lost) = oneshot::channel();
        let taken = Arc::<OnceLock<Taken>>::default();
        let keeper = tokio::spawn(keep(lease, taken.clone(), given_up, loses));
        Seat { standby, says, taken, lost: Some(lost), give_up, keeper }
    }

    /// The store was taken: from now on its term is asked for where the lease cannot be.
    pub fn took(&self, reader: Arc<dyn Reader>, term: Term) {
        // Once.
        let _ = self.taken.set((reader, term));
    }

    /// What serves next has the listener alone.
    pub async fn opens(&mut self) {
        self.says.send_replace("serves".to_owned());
        std::mem::take(&mut self.standby).end().await;
    }

    /// Completes, once, when another has the lease or the store.
    pub fn lost(&mut self) -> impl Future<Output = Failure> + Send + use<> {
        let lost = self.lost.take();
        async move {
            match lost {
                Some(lost) => match lost.await {
                    Ok(failure) => failure,
                    Err(_) => std::future::pending().await,
                },
                None => std::future::pending().await,
            }
        }
    }

    /// Gives it up, so that another can take it at once.
    pub async fn release(self) {
        self.standby.end().await;
        // It has ended by itself where the lease was lost.
        let _ = self.give_up.send(());
        let _ = self.keeper.await;
    }
}

/// Renews a lease until it is given up or lost.
async fn keep(
    mut lease: Lease,
    taken: Arc<OnceLock<Taken>>,
    mut given_up: oneshot::Receiver<()>,
    loses: oneshot::Sender<Failure>,
) {
    let (mut renewed, mut away, mut pause) = (Instant::now(), false, RENEW);
    let why = loop {
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            _ = &mut given_up => return lease.release().await,
        }
        pause = RENEW;
        match lease.step().await {
            Step::Held => {
                renewed = Instant::now();
                if std::mem::take(&mut away) {
                    note(&format!("the lease {} is renewed again", lease.shown()));
                }
            }
            Step::Again => pause = Duration::ZERO,
            Step::Lost { holder } | Step::Waits { holder, .. } => break lost(&lease, &holder),
            Step::Away(reason) | Step::Refused(reason) if renewed.elapsed() >= DURATION => {
                if !std::mem::replace(&mut away, true) {
                    note(&format!(
                        "the lease {} cannot be renewed ({reason}); this control plane goes on as long as it has the \
                         store",
                        lease.shown()
                    ));
                }
                if let Some(fenced) = fenced(&taken).await {
                    break Failure::platform(fenced.to_string());
                }
            }
            Step::Away(_) | Step::Refused(_) => {}
        }
    };
    // Nobody waits any more where the control plane ends already.
    let _ = loses.send(why);
}

/// Whether another took the store since; none where the store does not answer either.
async fn fenced(taken: &OnceLock<Taken>) -> Option<StoreError> {
    let (reader, ours) = taken.get()?.clone();
    let held = tokio::task::spawn_blocking(move || reader.term()).await.ok()?.ok()?;
    (held > ours).then_some(StoreError::Fenced { ours: ours.0, held: held.0, by: None })
}

fn lost(lease: &Lease, holder: &str) -> Failure {
    let holder = if holder.is_empty() { "that is gone" } else { holder };
    Failure::platform(format!("another control plane, {holder}, took the lease {}; this one stops", lease.shown()))
}

fn refused(lease: &Lease, reason: &str) -> Failure {
    Failure::new(format!("the lease {} cannot be used: {reason}", lease.shown())).help(
        "apply the Role `aviflow-control-plane` of the manifest, with its binding; `aviflow doctor --kube` checks them",
    )
}

/// What answers on a listener before it is this one's turn.
#[derive(Default)]
struct Standby(Option<(oneshot::Sender<()>, JoinHandle<std::io::Result<()>>)>);

impl Standby {
    fn start((listener, speech): (&TcpListener, Option<Speech>), why: watch::Receiver<String>) -> Result<Standby> {
        let shared = rustix::io::fcntl_dupfd_cloexec(listener, 0).map_err(std::io::Error::from);
        let listener = shared.and_then(|fd| TcpListener::from_std(fd.into()));
        let listener = listener.or_fail(|| "the listener cannot be shared".to_owned())?;
        let (end, ended) = oneshot::channel();
        let served = tokio::spawn(aviflow_server::standby(Listener::new(listener, speech), why, async {
            // Dropped, it ends as well.
            let _ = ended.await;
        }));
        Ok(Standby(Some((end, served))))
    }

    async fn end(self) {
        let Some((end, mut served)) = self.0 else { return };
        let _ = end.send(());
        // A client that sends half a request must not keep the next one from its answer.
        if tokio::time::timeout(LAST_ANSWERS, &mut served).await.is_err() {
            served.abort();
        }
    }
}
