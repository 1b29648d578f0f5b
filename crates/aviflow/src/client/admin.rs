//! The routes of administrators: documents, queues, pools, the policy, drains, what people changed.

use super::{Client, encode};
use crate::error::{Result, While};
use aviflow_api::admin::{AdminDocument, PolicySpec};
use aviflow_api::rest::{
    Act, Applied, DrainAction, DrainAnswer, DrainInfo, DrainRequest, Observed, PolicyApply, PoolAction, PoolApply,
    PoolInfo, QueueAction, QueueApply, QueueInfo, Reason, ServerAction, ServerInfo,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use ureq::SendBody;

impl Client {
    /// Makes what there is as a document says.
    pub fn apply(&self, document: &AdminDocument, reason: Reason) -> Result<Applied> {
        match document.clone() {
            AdminDocument::Queue(queue) => {
                let path = format!("/v1/queues/{}", encode(&queue.name));
                self.put(&path, &QueueApply { queue, reason })
            }
            AdminDocument::Pool(pool) => {
                let path = format!("/v1/pools/{}", encode(&pool.name));
                self.put(&path, &PoolApply { pool, reason })
            }
            AdminDocument::Policy(policy) => self.put("/v1/policy", &PolicyApply { policy, reason }),
        }
    }

    /// Who holds the GPUs of a cluster, and what waits.
    pub fn observed(&self) -> Result<Observed> {
        self.get("/v1/observed", &[])
    }

    /// A queue.
    pub fn queue(&self, name: &str) -> Result<QueueInfo> {
        self.get(&format!("/v1/queues/{}", encode(name)), &[])
    }

    /// Opens, holds, drains or deletes a queue.
    pub fn act_on_queue(&self, name: &str, action: &QueueAction) -> Result<Applied> {
        self.post(&format!("/v1/queues/{}/actions", encode(name)), action)
    }

    /// A pool.
    pub fn pool(&self, name: &str) -> Result<PoolInfo> {
        self.get(&format!("/v1/pools/{}", encode(name)), &[])
    }

    /// Takes a pool's document away.
    pub fn act_on_pool(&self, name: &str, action: &PoolAction) -> Result<Applied> {
        self.post(&format!("/v1/pools/{}/actions", encode(name)), action)
    }

    /// The policy.
    pub fn policy(&self) -> Result<PolicySpec> {
        self.get("/v1/policy", &[])
    }

    /// Pauses all starts, or lets them go on.
    pub fn act_on_server(&self, action: &ServerAction) -> Result<ServerInfo> {
        self.post("/v1/server/actions", action)
    }

    /// Drains nodes.
    pub fn drain(&self, request: &DrainRequest) -> Result<DrainAnswer> {
        self.post("/v1/drains", request)
    }

    /// Drains.
    pub fn drains(&self) -> Result<Vec<DrainInfo>> {
        self.get("/v1/drains", &[])
    }

    /// Calls a drain off.
    pub fn act_on_drain(&self, name: &str, action: &DrainAction) -> Result<DrainAnswer> {
        self.post(&format!("/v1/drains/{}/actions", encode(name)), action)
    }

    /// What people changed, newest first.
    pub fn acts(&self, kind: Option<&str>, name: Option<&str>, limit: u32) -> Result<Vec<Act>> {
        let mut query = vec![("limit", limit.to_string())];
        query.extend(kind.map(|kind| ("kind", kind.to_owned())));
        query.extend(name.map(|name| ("name", name.to_owned())));
        self.get("/v1/acts", &query)
    }

    fn put<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T> {
        let body = serde_json::to_vec(body).or_fail(|| "the request cannot be written".to_owned())?;
        let request = self.agent.put(self.path(path, &[]));
        let body = SendBody::from_owned_reader(std::io::Cursor::new(body));
        let response = self.send(request, "application/json", "application/json", body)?;
        self.json(response)
    }
}
