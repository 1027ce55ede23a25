package egress

import (
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// E17: a goroutine that copies all the time lets others have their packets.
func TestLook(t *testing.T) { // not parallel: it has the only processor
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	server, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	client, err := net.Dial("udp", server.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	var received atomic.Int64
	waiting := make(chan struct{})
	go func() {
		for packet := make([]byte, 10); ; {
			waiting <- struct{}{}
			if _, _, err := server.ReadFrom(packet); err != nil {
				return
			}
			received.Add(1)
		}
	}()
	var l look
	if err := l.open(); err != nil {
		t.Fatal(err)
	}
	defer l.close()
	const packets = 100
	found := 0
	for i := range packets {
		<-waiting
		runtime.Gosched() // until it waits for a packet
		if _, err := client.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		l.atIntervals(lookInterval * time.Duration(2*i+2))
		if received.Load() == int64(i+1) {
			found++
		}
	}
	if found < packets*9/10 {
		t.Errorf("%d of %d packets were received by the time that the runtime had looked at the network", found, packets)
	}
}
