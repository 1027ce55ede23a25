package inject

import (
	"fmt"
	"maps"
)

// The annotations of a pod that replace settings.
const (
	cpuRequest    = "nametap.dev/cpu-request"
	cpuLimit      = "nametap.dev/cpu-limit"
	memoryRequest = "nametap.dev/memory-request"
	memoryLimit   = "nametap.dev/memory-limit"
)

// forPod returns the settings of a pod: those of its annotations take precedence. An error says why it is refused.
func (c Config) forPod(p *pod) (Config, error) {
	c.Resources = Resources{maps.Clone(c.Resources.Requests), maps.Clone(c.Resources.Limits)}
	for _, a := range []struct {
		name    string
		amounts Amounts
		key     string
	}{
		{cpuRequest, c.Resources.Requests, "cpu"}, {memoryRequest, c.Resources.Requests, "memory"},
		{cpuLimit, c.Resources.Limits, "cpu"}, {memoryLimit, c.Resources.Limits, "memory"},
	} {
		if text, ok := p.Metadata.Annotations[a.name]; ok {
			a.amounts[a.key] = text
			if err := c.Resources.check(); err != nil {
				return c, fmt.Errorf("annotation %s: %w", a.name, err)
			}
		}
	}
	return c, nil
}
