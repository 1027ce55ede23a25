package test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// TestAgentsConnectAtOnce connects many agents at once, over TLS: each gets the table.
func TestAgentsConnectAtOnce(t *testing.T) { // D34
	const agents = 1000
	p := startPlane(t)
	var connecting sync.WaitGroup
	for i := range agents {
		connecting.Go(func() {
			agent := pod{p, fmt.Sprintf("198.19.%d.%d", 1+i/250, 1+i%250)}
			table, err := agent.table(t.Context())
			for tries := 20; tries > 0 && status.Code(err) == codes.Unavailable; tries-- { // a busy machine ends attempts
				table, err = agent.table(t.Context())
			}
			if err != nil || !bytes.Contains(table, []byte("web.shop")) {
				t.Errorf("agent %d: %v, a table of %d bytes", i, err, len(table))
			}
		})
	}
	connecting.Wait()
}
