//! How a control plane on a cluster speaks: which certificates it shows, and whose it takes.
//!
//! Known before its turn to decide comes, as who waits is asked for its health over TLS too. The authority in the
//! cluster is the one thing that is made before.

use crate::cli::KubeArgs;
use crate::error::{Failure, Result};
use crate::output::note;
use aviflow_kube::certified::{self, Clients, Keeper};
use aviflow_kube::{Client, authority};
use aviflow_tls::Shown;
use aviflow_tls::listener::Speech;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// The Service of the chart.
const SERVICE: &str = "aviflow";

/// Speech of a control plane on a cluster.
pub struct Tls {
    /// To people; none where something before it speaks TLS.
    pub people: Option<Speech>,
    /// To agents, and to pods that fetch their code.
    pub agents: Speech,
    /// Whose client certificates are taken, where some are.
    pub clients: Option<Arc<Clients>>,
    /// The certificate of the own authority in PEM.
    pub authority: String,
}

impl Tls {
    /// As it is asked for; none where nobody is spoken to with it.
    pub fn begin(args: &KubeArgs, client: Option<&Client>, bound: IpAddr, runtime: &Runtime) -> Result<Option<Tls>> {
        // One that only looks has no agents.
        let Some(client) = client.filter(|_| args.tls || !super::kube::observes(args)) else { return Ok(None) };
        let namespace = &args.kube_namespace;
        let authority = runtime.block_on(authority::of(client, namespace)).map_err(|why| {
            Failure::new(format!("the control plane's own authority is not to be had: {why}")).help(
                "apply the Role `aviflow-control-plane` of the manifest, with its binding; `aviflow doctor --kube` \
                 checks them",
            )
        })?;
        let pem = authority.certificate().to_owned();
        let mut addresses = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        addresses.extend(args.advertise.into_iter().chain((!bound.is_unspecified()).then_some(bound)));
        let failed = |why: String| Failure::new(format!("TLS cannot be spoken: {why}"));
        let shown = Shown::new(authority, certified::names_of(SERVICE, namespace), addresses).map_err(failed)?;
        let shown = Arc::new(shown);
        let clients = args.tls.then(Arc::<Clients>::default);
        let given = args.tls_secret.as_ref().map(|name| (namespace.clone(), name.clone()));
        let mut keeper = Keeper::new(client.clone(), clients.clone(), shown.clone(), given);
        runtime.block_on(keeper.look(&note));
        runtime.spawn(keeper.run(note));
        let people = args.tls.then(|| Speech::to_people(shown.clone())).transpose().map_err(failed)?;
        let agents = Speech::to_agents(shown).map_err(failed)?;
        Ok(Some(Tls { people, agents, clients, authority: pem }))
    }
}
