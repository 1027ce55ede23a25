// Package chans has functions for channels that only wake a goroutine: their values carry no data.
package chans

// Wake sends to channel, which has a buffer of one, unless a value already waits there: one value stands for several
// events. It does not block.
func Wake(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// Closed reports whether channel is closed. It is for channels to which nothing is sent.
func Closed(channel <-chan struct{}) bool {
	select {
	case <-channel:
		return true
	default:
		return false
	}
}
