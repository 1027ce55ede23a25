package test

import (
	"bytes"
	"fmt"
	"sync"
	"testing"
)

// TestAgentsConnectAtOnce connects many agents at once, over TLS: each gets the table.
func TestAgentsConnectAtOnce(t *testing.T) { // D34
	const agents = 1000
	p := startPlane(t)
	var connecting sync.WaitGroup
	for i := range agents {
		connecting.Go(func() {
			agent := pod{p, fmt.Sprintf("198.19.%d.%d", 1+i/250, 1+i%250)}
			err := agent.follow(t.Context(), func(table []byte) bool { return !bytes.Contains(table, []byte("web.shop")) })
			if err != nil {
				t.Errorf("agent %d: %v", i, err)
			}
		})
	}
	connecting.Wait()
}
