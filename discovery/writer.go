package discovery

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/nametap/nametap/discovery/object"
	"github.com/nametap/nametap/discovery/source"
)

// newWriter returns the writer of automatic VIPs, or nil if none is wanted.
func (s *Server) newWriter() (source.Writer, error) {
	if s.cfg.Lease == (source.Lease{}) {
		return nil, nil //nolint:nilnil // there is none
	}
	if s.cfg.Identity == "" {
		return nil, errors.New("this replica needs a name in the Lease, and the machine has none")
	}
	number := s.inputs.number(s.inputs.kube)
	return s.cfg.Kubernetes.NewWriter(source.WriterConfig{
		Lease: s.cfg.Lease, Identity: s.cfg.Identity, RootNamespace: s.cfg.RootNamespace,
		Wanted:  func() map[object.Key]object.VIPStatus { return s.push.Statuses(number) },
		Changed: s.writeVIPs, Logger: s.cfg.Logger,
	})
}

// runWriter writes automatic VIPs, once all objects are known, until ctx ends.
func (s *Server) runWriter(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case <-s.ready:
		s.writer.Run(ctx)
		return nil
	}
}

// newLeaseMetric returns the metric that is 1 if this replica writes.
func newLeaseMetric(s *Server) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Namespace: "nametap", Subsystem: "discovery", Name: "lease_held",
		Help: "1 while this replica holds the Lease and may write automatic VIPs, otherwise 0.",
	}, func() float64 {
		if s.writer != nil && s.writer.Holds() {
			return 1
		}
		return 0
	})
}
