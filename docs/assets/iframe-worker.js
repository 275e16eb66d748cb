// A browser starts no worker from a page that was opened from the disk. The search of this site runs in one, so there it
// runs in a hidden frame instead: the same messages, the same script, no server. The name is the one that it looks for.
(() => {
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.tell(this, data);
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      script.onload = () => this.begin();
      frame.contentDocument.body.append(script);
    }

    begin() {
      const early = this.waiting;
      this.waiting = null;
      early.forEach((data) => this.tell(this.inside, data));
    }

    tell(target, data) {
      const event = new MessageEvent("message", { data });
      target.dispatchEvent(event);
      if (target === this && this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else setTimeout(() => this.tell(this.inside, data));
    }

    terminate() {}
  }

  window.IFrameWorker = IFrameWorker;
  window.Worker = IFrameWorker;
})();
