package discovery

import (
	"maps"

	"github.com/nametap/nametap/discovery/source"
)

// defaultClusterID is what agents call their cluster by default.
const defaultClusterID = "Kubernetes"

// newClusters makes the other clusters, if there are any.
func (s *Server) newClusters() error {
	if s.cfg.ClustersNamespace == "" {
		return nil
	}
	own := s.cfg.ClusterID
	if own == "" {
		own = defaultClusterID
	}
	if s.state == nil {
		s.cfg.Logger.Warn("without a state directory, the hosts of a cluster are missing after a restart while its API server is away (--state-dir)")
	}
	var err error
	s.clusters, err = s.cfg.Kubernetes.NewClusters(source.ClustersConfig{
		Namespace: s.cfg.ClustersNamespace, RootNamespace: s.cfg.RootNamespace, Own: own,
		TokenAudience: s.cfg.TokenAudience, Wait: s.cfg.ClusterTimeout, Debounce: s.cfg.Debounce,
		State: s.state, Saved: s.savedCluster, Publish: s.publishClusters, Logger: s.cfg.Logger,
	})
	if s.identities != nil {
		s.identities.Others = s.clusters.Tokens
	}
	return err
}

// selectNamespaces makes the discovery selectors of the mesh count in the other clusters.
func (s *Server) selectNamespaces(selectors []string) {
	if s.clusters != nil {
		s.clusters.Select(selectors)
	}
}

// savedCluster notes the result of saving the objects of a cluster.
func (s *Server) savedCluster(err error) {
	if err != nil {
		s.failed(stepSaveCluster, err)
		return
	}
	s.recovered(stepSaveCluster)
}

// publishClusters puts what has changed in the other clusters to use.
func (s *Server) publishClusters(u source.Update) {
	// A cluster is missing until its objects are in use.
	missing := maps.Clone(u.Missing)
	maps.Copy(missing, s.missing)
	s.push.SetMissing(missing)
	s.publishChanges(fromClusters, input{errs: u.Errors, kept: u.Kept, tooEarly: u.Waiting}, u.Changes...)
	s.missing = u.Missing
	s.push.SetMissing(s.missing)
	if u.Waiting == "" {
		s.noteRead(fromClusters)
	}
}
